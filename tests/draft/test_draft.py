"""Published weight files in and out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config

from longspec.draft.folder import write_draft
from longspec.methods.draft_files import draft_weights_file, write_draft_manifest
from longspec.methods.glide.layer import UNUSED, GlideLayer, published_layout
from longspec.methods.glide.method import METHOD

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
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return GlideLayer(Qwen2Config(**shape, num_hidden_layers=2))


def test_files_have_exactly_the_published_names(layer: GlideLayer, tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", published_layout(layer.state_dict()), {"stage": "base"})
    pth = torch.load(tmp_path / "draft/draft_model_weights.pth", weights_only=True)
    assert set(pth) == PUBLISHED == set(load_file(tmp_path / "draft/model.safetensors"))
    assert pth["cross_attn.k_proj.weight"].shape == (16, 32)
    assert json.loads((tmp_path / "draft/config.json").read_text())["stage"] == "base"


def test_published_files_load_unchanged(layer: GlideLayer, tmp_path: Path) -> None:
    """A .pth, a .safetensors or a folder; the unused tensors may hold anything."""
    write_draft(tmp_path / "draft", published_layout(layer.state_dict()), {})
    pth = tmp_path / "draft/draft_model_weights.pth"
    published = torch.load(pth, weights_only=True)
    for name in UNUSED:
        published[name] = torch.randn_like(published[name])
    torch.save(published, pth)
    for path in (pth, tmp_path / "draft/model.safetensors", tmp_path / "draft"):
        config = Qwen2Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
        fresh = GlideLayer(config)
        METHOD.load(fresh, path, config, METHOD.stored_settings(path))
        assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in layer.state_dict().items())


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
