"""Tiny targets with random weights, and the packed rows whose states are stored."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.corpus import Corpus, sentences
from tests.random_targets import any_target_path, seeded, target_path
from tests.states.stored import DFLASH_OFFLINE, EAGLE3_OFFLINE, GLIDE_OFFLINE, Stored, save_target, save_vocabulary
from tests.train.test_held_out_estimate import make_packed

__all__ = ["any_target_path", "seeded", "target_path"]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Sources:
    """What states are made from."""

    target: Path
    data: Path
    vocabulary: Path

    def glide(self, folder: Path, *overrides: str) -> Stored:
        return Stored(folder, [*GLIDE_OFFLINE, *overrides], self.target, self.data)

    def dflash(self, folder: Path, *overrides: str) -> Stored:
        return Stored(folder, [*DFLASH_OFFLINE, *overrides], self.target, self.data, self.vocabulary)

    def eagle3(self, folder: Path, *overrides: str) -> Stored:
        return Stored(folder, [*EAGLE3_OFFLINE, *overrides], self.target, self.data, self.vocabulary)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Sources:
    """A target of three layers, some rows with held-out records, and a draft vocabulary of 40 tokens."""
    folder, size = tmp_path_factory.mktemp("sources"), corpus.build.vocabulary
    target = save_target(folder, Qwen2Config(vocab_size=size, initializer_range=0.3, tie_word_embeddings=False, **SHAPE))
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30)]
    data = make_packed(folder / "rows", corpus, "base", sentences(14), held_out)
    ids = tuple(range(size // 2 - 20, size // 2 + 20))
    return Sources(target, data, save_vocabulary(folder, data, ids, size))
