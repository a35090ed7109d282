"""Tiny targets with random weights, and the packed rows whose states are stored."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.corpus import Corpus
from tests.random_targets import any_target_path, seeded, target_path
from tests.states.stored import OFFLINE, Stored, rows_and_vocabulary, save_target

__all__ = ["any_target_path", "seeded", "target_path"]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


StatesOf = Callable[..., Stored]  # of a method's name, a folder and overrides


@pytest.fixture(scope="session")
def states_of(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> StatesOf:
    """States of a target of three layers, of some rows with held-out records, with a draft vocabulary of 40 tokens."""
    folder, size = tmp_path_factory.mktemp("sources"), corpus.build.vocabulary
    target = save_target(folder, Qwen2Config(vocab_size=size, initializer_range=0.3, tie_word_embeddings=False, **SHAPE))
    data, vocabulary = rows_and_vocabulary(folder, corpus, 14)

    def make(method: str, folder: Path, *overrides: str) -> Stored:
        return Stored(folder, [*OFFLINE[method], *overrides], target, data, None if method == "glide" else vocabulary)

    return make
