"""A target of the corpus's vocabulary, and jobs that train beside it."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.corpus import Corpus
from tests.jobs import PLAIN, Job, MakeJob
from tests.random_targets import seeded
from tests.states.stored import save_target

__all__ = ["seeded"]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """The manifest of a random target of the corpus's vocabulary."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=corpus.build.vocabulary, num_key_value_heads=2, initializer_range=0.3, **shape)
    return save_target(tmp_path_factory.mktemp("target"), config)


@pytest.fixture
def make_job(tmp_path: Path, target: Path, corpus: Corpus) -> MakeJob:
    def make(name: str, overrides: list[str] | None = None, launcher: list[str] | None = None) -> Job:
        return Job(tmp_path / name, target, corpus.packed, overrides or [], launcher or PLAIN)

    return make
