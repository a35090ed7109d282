"""A target of the corpus's vocabulary, and jobs that train beside it."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from longspec.atomic_files import write_json
from tests.corpus import Corpus
from tests.jobs import PLAIN, Job, MakeJob
from tests.random_targets import seeded

__all__ = ["seeded"]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """The manifest of a random target of the corpus's vocabulary."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=corpus.build.vocabulary, num_key_value_heads=2, initializer_range=0.3, **shape)
    folder = tmp_path_factory.mktemp("target")
    Qwen2ForCausalLM(config).save_pretrained(folder / "target")
    write_json(folder / "target_manifest.json", {"path": str(folder / "target"), "source": "test", "files": {}})
    return folder / "target_manifest.json"


@pytest.fixture
def make_job(tmp_path: Path, target: Path, corpus: Corpus) -> MakeJob:
    def make(name: str, overrides: list[str] | None = None, launcher: list[str] | None = None) -> Job:
        return Job(tmp_path / name, target, corpus.packed, overrides or [], launcher or PLAIN)

    return make
