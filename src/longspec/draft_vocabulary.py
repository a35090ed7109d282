"""The file of a draft vocabulary: the tokens of the target that a draft can propose, the most frequent ones of its training.

No torch: what is planned and counted reads it too.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from longspec.atomic_files import read_json_object, write_json

AGAIN = "remove the file; the workflow counts it again"


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: of the target, ascending; the draft's token n is the target's token ids[n]. size: of the target's vocabulary.

    tokenizer: hash of the target's tokenizer; coverage: the share of the trained tokens that are among `ids`, by the name of
    each set of rows that was counted, and over all of them as `all`.
    """

    ids: tuple[int, ...]
    size: int
    tokenizer: str
    coverage: dict[str, float]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(path, {"ids": list(self.ids), "size": self.size, "tokenizer": self.tokenizer, "coverage": self.coverage})


def read_draft_vocabulary(path: Path) -> DraftVocabulary:
    """Read the file. Raises ValueError with the file's name, the field and the fix for one that is none."""
    content = read_json_object(path)
    for name, kind in (("ids", list), ("size", int), ("tokenizer", str), ("coverage", dict)):
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{path}: {name}: not as a draft vocabulary has it; {AGAIN}")
    ids, size = tuple(content["ids"]), content["size"]
    whole = all(type(token) is int for token in ids)
    if not (ids and whole and ids[0] >= 0 and ids[-1] < size and all(a < b for a, b in pairwise(ids))):
        raise ValueError(f"{path}: ids: must be tokens 0 to {size - 1} of the target, ascending, each once; {AGAIN}")
    return DraftVocabulary(ids, size, content["tokenizer"], content["coverage"])
