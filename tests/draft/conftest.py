"""A draft's weights, and the verb that makes its folder. The target's folder holds its config.json alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config

from longspec.atomic_files import write_json, write_text
from longspec.config import compose, to_yaml
from longspec.draft.__main__ import main
from longspec.methods.glide.layer import UNUSED, GlideLayer

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = Qwen2Config(**SHAPE, num_hidden_layers=2, vocab_size=97)
Extract = Callable[..., dict[str, Tensor]]
Verb = Callable[..., None]


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn_like(tensor) for name, tensor in GlideLayer(CONFIG).state_dict().items()}


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Verb:
    """A verb of the room with its arguments, as on a command line. An error of ours is raised as SystemExit."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr("sys.argv", ["draft", *map(str, arguments)])
        main()

    return run


@pytest.fixture
def extract(tmp_path: Path, verb: Verb) -> Extract:
    """The verb; returns what it wrote, less the unused tensors."""
    CONFIG.save_pretrained(tmp_path / "target")
    write_json(tmp_path / "target.json", {"path": str(tmp_path / "target")})
    write_text(tmp_path / "recipe.yaml", to_yaml(compose("train", ["run=demo"]).recipe))

    def run(source: Path, *more: str) -> dict[str, Tensor]:
        options = ["--recipe", tmp_path / "recipe.yaml", "--target", tmp_path / "target.json", "--out", tmp_path / "draft"]
        verb("extract", source, *options, *more)
        written = load_file(tmp_path / "draft/model.safetensors")
        return {name: tensor for name, tensor in written.items() if name not in UNUSED}

    return run
