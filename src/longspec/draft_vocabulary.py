"""A tokenizer's files with their hash, and the draft vocabulary, a subset of the tokenizer's tokens.

A draft proposes tokens of its vocabulary only, the most frequent ones of its training. No torch: planning and counting read
these files too.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from longspec.atomic_files import describe_files, read_json, sha256_json, write_json

COUNT_AGAIN = "count it again by python -m longspec.data vocabulary; a file of the workflow's: remove it, which then counts it"
GIVE_OWN = "give the file that was counted for this target; a file of the workflow's: remove it, which then counts it again"
ALL = "all"  # the rows of every set
LOW_COVERAGE = 0.95  # share of the trained tokens; below it a draft often cannot propose the next token
# Written by save_pretrained or by the publishers of a model; whichever exist belong to the tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of a folder's tokenizer files."""
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def tokenizer_hash(files: dict[str, Any]) -> str | None:
    """Return the hash of the tokenizer files in a tokenizer's or target's manifest; None if it lists none."""
    own = {name: files[name] for name in TOKENIZER_FILES if name in files}
    return sha256_json(own) if own else None


def tokenizer_hash_of(folder: Path) -> str | None:
    """Return the hash of the tokenizer files in a target's folder; None if there are none."""
    return tokenizer_hash(describe_files(folder, tokenizer_files(folder)))


@dataclass(frozen=True)
class DraftVocabulary:
    """Hold the target's tokens that a draft can propose, ascending: the draft's token n is the target's token ids[n].

    size: tokens of the target's vocabulary. tokenizer: hash of the target's tokenizer. coverage: the share of the trained
    tokens that are in `ids`, by the name of each counted set of rows, and over all of them as `all`.
    """

    ids: tuple[int, ...]
    size: int
    tokenizer: str
    coverage: dict[str, float]

    @property
    def hash(self) -> str:
        """Return the hash of ids, size and tokenizer; coverage is no part of it."""
        return sha256_json([self.ids, self.size, self.tokenizer])

    @property
    def low_coverage(self) -> str:
        """Return a warning if less than LOW_COVERAGE of the trained tokens can be proposed, else an empty text."""
        share = self.coverage[ALL]
        if share >= LOW_COVERAGE:
            return ""
        return (
            f"the draft vocabulary of {len(self.ids)} tokens holds {share:.1%} of the trained tokens, less than "
            f"{LOW_COVERAGE:.0%}: what it lacks is never proposed; give it more tokens"
        )

    def check_tokens(self, path: object, size: int, source: object, tokenizer: str | None = None) -> None:
        """Raise ValueError if the target `source` has another number of tokens or another tokenizer.

        tokenizer: hash of the target's tokenizer, if it is known; the number of tokens alone proves little.
        """
        if self.size != size:
            raise ValueError(f"{path}: size: of a target of {self.size} tokens, {source} has {size}; {GIVE_OWN}")
        if tokenizer is not None:
            self.check_tokenizer(path, tokenizer, source)

    def check_tokenizer(self, path: object, tokenizer: str, source: object) -> None:
        """Raise ValueError if `source`, rows or another vocabulary, has another tokenizer."""
        if self.tokenizer != tokenizer:
            raise ValueError(
                f"{path}: tokenizer: {self.tokenizer[:12]}, a vocabulary of another tokenizer than {source}, {tokenizer[:12]}: "
                f"its numbers are other tokens there; {GIVE_OWN}"
            )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, {"ids": list(self.ids), "size": self.size, "tokenizer": self.tokenizer, "coverage": self.coverage})


def read_draft_vocabulary(path: Path, *, counted: bool = False) -> DraftVocabulary:
    """Read a draft vocabulary. counted: whether its coverage must be there, which an imported draft's lacks.

    Raises ValueError, with file, field and fix, if the content does not fit."""
    content = read_json(path)
    for name, kind in (("ids", list), ("size", int), ("tokenizer", str), ("coverage", dict)):
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{path}: {name}: not as a draft vocabulary has it; {COUNT_AGAIN}")
    ids, size = tuple(content["ids"]), content["size"]
    whole = all(type(token) is int for token in ids)
    if not (ids and whole and ids[0] >= 0 and ids[-1] < size and all(a < b for a, b in pairwise(ids))):
        raise ValueError(f"{path}: ids: must be tokens 0 to {size - 1} of the target, ascending, each once; {COUNT_AGAIN}")
    if counted and ALL not in content["coverage"]:
        raise ValueError(f"{path}: coverage: must have the share of all rows as '{ALL}'; {COUNT_AGAIN}")
    return DraftVocabulary(ids, size, content["tokenizer"], content["coverage"])
