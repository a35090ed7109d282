"""The prompts of an evaluation: one prompt, and all prompts of a run."""

import json
from dataclasses import dataclass

from longspec.atomic_files import sha256_text


@dataclass(frozen=True)
class Prompt:
    """One prompt of a task: `ids` are of the record `record`, a line's number from 0; at most new_tokens are decoded."""

    task: str
    number: int
    record: int
    ids: list[int]
    new_tokens: int
    reference: str | None = None
    cut_tokens: int = 0  # left out of its middle

    @property
    def hash(self) -> str:
        """Hash of the prompt's tokens and the number of tokens to decode."""
        return sha256_text(json.dumps([self.ids, self.new_tokens]))[:16]
