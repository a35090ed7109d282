"""Tiny targets with random weights, and the packed rows whose states are stored."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen2Config

from longspec.atomic_files import read_json
from longspec.draft_vocabulary import DraftVocabulary
from tests.corpus import Corpus, sentences
from tests.random_targets import any_target_path, seeded, target_path
from tests.states.stored import OFFLINE, Stored, save_target
from tests.train.test_held_out_estimate import make_packed

__all__ = ["any_target_path", "seeded", "target_path"]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


StatesOf = Callable[..., Stored]  # of a method's name, a folder and overrides


@pytest.fixture(scope="session")
def states_of(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> StatesOf:
    """States of a target of three layers, of some rows with held-out records, with a draft vocabulary of 40 tokens."""
    folder, size = tmp_path_factory.mktemp("sources"), corpus.build.vocabulary
    target = save_target(folder, Qwen2Config(vocab_size=size, initializer_range=0.3, tie_word_embeddings=False, **SHAPE))
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30)]
    data, vocabulary = make_packed(folder / "rows", corpus, "base", sentences(14), held_out), folder / "vocabulary.json"
    ids = tuple(range(size // 2 - 20, size // 2 + 20))
    DraftVocabulary(ids, size, read_json(data)["tokenizer"], {"all": 1.0}).write(vocabulary)

    def make(method: str, folder: Path, *overrides: str) -> Stored:
        return Stored(folder, [*OFFLINE[method], *overrides], target, data, None if method == "glide" else vocabulary)

    return make
