"""States of tiny targets stored in this process."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import describe_files, read_json, write_json
from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.distributed import ALONE
from longspec.draft_vocabulary import DraftVocabulary
from longspec.states.build import Computation, build, rows_of
from longspec.states.load import Place, find_rows
from tests.corpus import Corpus, sentences
from tests.jobs import DFLASH, EAGLE3, RECIPE
from tests.train.test_held_out_estimate import make_packed

OFFLINE = {
    "glide": [*RECIPE, "recipe.states.source=offline", "recipe.draft.anchors=off"],
    "eagle3": [*EAGLE3, "recipe.states.source=offline", "recipe.method.layers=[0,1,2]"],
    "dflash": [*DFLASH, "recipe.states.source=offline", "recipe.method.layers=[1,2]"],
}


@cache
def _composed(overrides: tuple[str, ...]) -> Any:
    return compose("train", list(overrides))


class Counted(Computation):
    """Counts the forwards of the target."""

    batches = 0

    def of(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        self.batches += 1
        return super().of(numbers)


@cache
def _computation(overrides: tuple[str, ...], target: Path, data: Path, vocabulary: Path | None, rows: str) -> Counted:
    """Of the rows that a folder of this name holds; its target is loaded once."""
    config = _composed(overrides)
    source, _ = rows_of(Path(rows), PackedRows(data))
    return Counted(config.recipe, config.runtime, target, source, vocabulary, torch.device("cpu"))


@dataclass
class Stored:
    """The states of a recipe's rows in a folder, and how often the target ran for them."""

    folder: Path
    overrides: list[str]
    target: Path
    data: Path
    vocabulary: Path | None = None
    batches: int = 0

    @property
    def config(self) -> Any:
        return _composed(tuple(self.overrides))

    def computation(self, *, held_out: bool = False) -> Counted:
        rows = f"held-out-{self.config.runtime.held_out_rows}" if held_out else "0-of-1"
        return _computation(tuple(self.overrides), self.target, self.data, self.vocabulary, rows)

    def build(self, shard: int = 0, num_shards: int = 1, *, held_out: bool = False) -> Path:
        computation = self.computation(held_out=held_out)
        out = self.folder / (f"held-out-{self.config.runtime.held_out_rows}" if held_out else f"{shard}-of-{num_shards}")
        before = computation.batches
        try:
            return build(out, computation, rows_of(out, PackedRows(self.data))[1], ALONE)
        finally:
            self.batches += computation.batches - before

    def rows(self, num_shards: int = 1, *, held_out: bool = False) -> list[Place]:
        """All of them, built and found."""
        paths = [self.build(shard, num_shards, held_out=held_out) for shard in range(num_shards)]
        return find_rows([self.declaration(held_out=held_out)], paths)

    def declaration(self, *, held_out: bool = False) -> dict[str, Any]:
        return self.computation(held_out=held_out).declaration

    def like(self, folder: Path, *overrides: str) -> "Stored":
        """Other states of the same rows."""
        return replace(self, folder=folder, overrides=[*self.overrides, *overrides], batches=0)


def save_target(folder: Path, config: Any) -> Path:
    """The manifest of a random target of this configuration."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")
    files = describe_files(folder / "target", ["model.safetensors"])
    write_json(folder / "target_manifest.json", {"path": str(folder / "target"), "source": "test", "files": files})
    return folder / "target_manifest.json"


def rows_and_vocabulary(folder: Path, corpus: Corpus, count: int, *more: dict[str, str]) -> tuple[Path, Path]:
    """Packed rows of records, others of which are held out; 40 proposed tokens, many of which the corpus has, and some not."""
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30)]
    data = make_packed(folder / "rows", corpus, "base", sentences(count), [*more, *held_out])
    size, vocabulary = corpus.build.vocabulary, folder / "vocabulary.json"
    ids = tuple(range(size // 2 - 20, size // 2 + 20))
    DraftVocabulary(ids, size, read_json(data)["tokenizer"], {"all": 1.0}).write(vocabulary)
    return data, vocabulary
