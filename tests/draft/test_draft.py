"""Published weight files in and out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspec.draft.folder import write_draft
from longspec.methods.draft_files import draft_weights_file, write_draft_manifest
from longspec.methods.glide.layer import GlideLayer, published_layout
from tests.draft.conftest import CONFIG

PROJECTIONS = [f"{kind}_proj.{part}" for kind in "qkv" for part in ("weight", "bias")] + ["o_proj.weight"]
PUBLISHED = {
    *(f"{attention}.{name}" for attention in ("self_attn", "cross_attn") for name in PROJECTIONS),
    *(f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_self_attention_layernorm.weight",
    "post_cross_attention_layernorm.weight",
}


@pytest.fixture
def layer() -> GlideLayer:
    return GlideLayer(CONFIG)


def test_files_have_exactly_the_published_names(layer: GlideLayer, tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", published_layout(layer.state_dict()), {"stage": "base"})
    pth = torch.load(tmp_path / "draft/draft_model_weights.pth", weights_only=True)
    assert set(pth) == PUBLISHED == set(load_file(tmp_path / "draft/model.safetensors"))
    assert pth["cross_attn.k_proj.weight"].shape == (16, 32)
    assert json.loads((tmp_path / "draft/config.json").read_text())["stage"] == "base"


def test_a_folder_that_differs_from_its_manifest_is_refused(layer: GlideLayer, tmp_path: Path) -> None:
    """A stage's draft: damaged, it would be trained on and published. Made anew, it has another manifest or none."""
    folder, published = tmp_path / "draft", published_layout(layer.state_dict())
    write_draft(folder, published, {"stage": "base"})
    write_draft_manifest(folder)
    assert draft_weights_file(folder) == folder / "model.safetensors"
    for name in ("config.json", "draft_model_weights.pth", "model.safetensors"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(ValueError, match=rf"{name}: its SHA-256 differs .* again after: rm -r {folder}$"):
            draft_weights_file(folder)
        (folder / name).write_bytes(before)
        draft_weights_file(folder)
    write_draft(folder, published, {"stage": "long"})
    draft_weights_file(folder)
