"""The text after each task's first prompt, token by token: what was drafted and kept."""

from dataclasses import dataclass
from typing import Any

from longspec import shown
from longspec.measure.lines import Evaluation


def visible(text: str) -> str:
    """Line ends, tabs and control characters as signs that a reader sees; a line end still ends the line."""
    return shown.lines(text.replace("\t", "⇥").replace("\n", "↵\n"))


@dataclass(frozen=True)
class Sample:
    """One text; a token is {text, depth}, its depth that in the draft of its round, 0: the target's own."""

    task: str
    context_tokens: int
    before: str
    tokens: list[dict[str, Any]]

    @property
    def counts(self) -> dict[str, int]:
        """Tokens in all, and drafted ones that were kept."""
        return {"tokens": len(self.tokens), "kept": sum(token["depth"] > 0 for token in self.tokens)}


def all_samples(evaluations: dict[str, Evaluation]) -> dict[str, list[Sample]]:
    """drafter -> its samples of the main setting, in the order of the tasks; a task or a drafter without one is left out."""
    found: dict[str, list[Sample]] = {}
    for drafter, one in evaluations.items():
        for row in one.lines[: len(one["task"])]:  # those of the main setting are first
            if "sample" in row:
                found.setdefault(drafter, []).append(Sample(row["task"], row["context_tokens"], **row["sample"]))
    return found
