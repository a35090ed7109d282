"""GLIDE drafts as LongSpec published them begin a run: a folder, or a file of weights alone."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspec.atomic_files import read_json, write_json
from longspec.config import compose, to_yaml
from longspec.methods.glide.layer import UNUSED, GlideLayer, published_layout
from tests.draft.conftest import CONFIG, Verb
from tests.refusals import refused


@pytest.fixture
def target(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def weights() -> dict[str, torch.Tensor]:
    """A published state dict: the unused keys and values of the cross attention hold numbers of their own."""
    torch.manual_seed(0)
    state = published_layout(GlideLayer(CONFIG).state_dict())
    return {name: torch.randn_like(tensor) for name, tensor in state.items()}


def folder_of(path: Path, state: dict[str, torch.Tensor], **changed: object) -> Path:
    """As sail/longspec-* have it."""
    path.mkdir()
    save_file({name: tensor.half() for name, tensor in state.items()}, path / "model.safetensors")
    write_json(path / "config.json", CONFIG.to_dict() | {"architectures": ["Qwen2GlideDecoderLayer"]} | changed)
    return path


@pytest.mark.parametrize("form", ["folder", "file", "checkpoint"])
def test_its_weights_are_taken_as_they_are(tmp_path: Path, target: Path, verb: Verb, form: str) -> None:
    state = {name: tensor.half() for name, tensor in weights().items()}
    source = tmp_path / "weights.pth"
    if form == "folder":
        source = folder_of(tmp_path / "published", state)
    else:
        torch.save({f"draft_model.{name}" if form == "checkpoint" else name: part for name, part in state.items()}, source)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(compose("train", ["run=demo"]).recipe))
    verb("import", source, "--target", target, "--out", out := tmp_path / "out", "--recipe", recipe)
    found = load_file(out / "model.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], torch.zeros_like(tensor) if name in UNUSED else tensor), name
    assert read_json(out / "config.json")["draft"] == "glide"


def test_a_draft_of_another_target_is_refused(tmp_path: Path, target: Path, verb: Verb) -> None:
    source = folder_of(tmp_path / "published", weights(), hidden_size=64)
    with refused(source / "config.json", "hidden_size: is 64", "is 32", kind=SystemExit):
        verb("import", source, "--target", target, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_payload_does_not_run(tmp_path: Path, target: Path, verb: Verb, zipped: bool) -> None:
    file, made = tmp_path / "weights.pth", tmp_path / "made by a payload"
    torch.save(weights() | {"a": Payload(made)}, file, _use_new_zipfile_serialization=zipped)
    with refused(file, "posix.mkdir", kind=SystemExit):
        verb("import", file, "--target", target, "--out", tmp_path / "out")
    assert not made.exists()
    torch.load(file, weights_only=False)
    assert made.is_dir()  # it would have been made
