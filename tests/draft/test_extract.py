"""Draft folders from checkpoints, of whose target nothing is read but its config.json, and their files."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from longspec.atomic_files import describe_files, read_json, sha256_file, write_json
from longspec.config import compose, yaml_files
from longspec.draft.folder import write_draft
from longspec.draft.trained import Checkpoint
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.draft_files import draft_weights_file, write_draft_manifest
from longspec.methods.glide.layer import UNUSED, GlideLayer, published_layout
from longspec.train.checkpoint import checkpoint_dir, save_load
from tests.draft.conftest import CONFIG, Verb
from tests.refusals import refused


def write_stage(folder: Path, state: dict[str, Tensor], ranks: int) -> Path:
    """A finished stage and its slot as ZeRO-3 leaves it: an equal part of each tensor on every rank. Returns the slot.

    Its recipe has a lag of 3, and lacks a field, as if a later version had added it.
    """
    recipe = OmegaConf.to_container(compose("train", ["run=demo", "recipe.draft.lag=3"]).recipe)
    del recipe["draft"]["temperature"]  # type: ignore[index,union-attr]
    slot = folder / "checkpoints/last"
    slot.mkdir(parents=True)
    names = [save_load.shard_name(rank) for rank in range(ranks)]
    for rank, file in enumerate(names):
        tensors = {}
        for name, tensor in state.items():
            each = -(-tensor.numel() // ranks)
            part = tensor.flatten()[rank * each : (rank + 1) * each]
            if part.numel():
                tensors[save_load.shard_key("fp32", f"draft_model.{name}", rank * each)] = part
        begin = save_load.header({key: tensor.numel() for key, tensor in tensors.items()})
        save_load.write_shard(slot / file, begin, tensors.values())
    shapes = {f"draft_model.{name}": list(tensor.shape) for name, tensor in state.items()}
    content = {"step": 5, "shapes": shapes, "files": describe_files(slot, names), "identity": {"recipe": recipe}}
    (slot / checkpoint_dir.MANIFEST).write_text(json.dumps(checkpoint_dir.seal(content)))
    named = {"slot": "checkpoints/last", "manifest_sha256": sha256_file(slot / checkpoint_dir.MANIFEST)}
    write_json(folder / "checkpoint.json", named | {"identity": {"recipe": recipe}, "runtime": {"micro_batch": 3}})
    return slot


def test_of_a_checkpoint_of_any_number_of_ranks_nothing_else_is_asked(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn runtime.yaml is not taken for what a finished stage was run by."""
    torch.manual_seed(3)
    state = {name: torch.randn_like(tensor) for name, tensor in GlideLayer(CONFIG).state_dict().items()}
    stage = tmp_path / "results/demo/variant/stage"
    slot = write_stage(stage, state, 3)
    monkeypatch.chdir(tmp_path)
    with refused("models/demo/target_manifest.json", "no such", "make it", kind=SystemExit):
        verb("extract", stage / "checkpoint.json")
    CONFIG.save_pretrained(tmp_path / "target")
    (tmp_path / "target/tokenizer.json").write_text("{}")
    write_json(tmp_path / "models/demo/target_manifest.json", {"path": str(tmp_path / "target"), "files": {}})
    (stage / "runtime.yaml").write_text("micro_batch: 3\nlog_target_loss: tru")
    verb("extract", stage / "checkpoint.json")
    config = read_json(stage / "draft" / "config.json")
    assert config["num_parameters"] == sum(tensor.numel() for tensor in state.values())
    assert (config["stage"], config["settings"]["lag"], config["target"]["hidden_size"]) == ("base", 3, 32)
    assert (stage / "draft" / "tokenizer.json").read_text() == "{}"
    told = yaml_files.read(stage / "draft" / "training_config.yaml")["base"]
    assert (told["recipe"]["draft"]["lag"], told["runtime"]) == (3, {"micro_batch": 3})
    written = load_file(stage / "draft" / "model.safetensors")
    assert written.keys() - UNUSED == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    (slot / save_load.shard_name(1)).rename(tmp_path / "elsewhere")
    with refused(slot / save_load.shard_name(1), "missing", kind=SystemExit):
        verb("extract", stage / "checkpoint.json")


def test_another_checkpoint_than_the_stages_last_is_refused(tmp_path: Path) -> None:
    write_stage(tmp_path, {}, 1)
    write_json(tmp_path / "checkpoint.json", read_json(tmp_path / "checkpoint.json") | {"manifest_sha256": "0"})
    with refused(tmp_path / "checkpoints/last", tmp_path / "checkpoint.json"):
        _ = Checkpoint(tmp_path / "checkpoint.json").slot


def test_another_vocabulary_than_the_trained_one_is_refused(tmp_path: Path) -> None:
    """A head's rows say the tokens that it was trained with, whichever file of that size is given."""
    trained, other = (DraftVocabulary(ids, 97, "t", {"all": 1.0}) for ids in ((3, 5), (3, 6)))
    path = tmp_path / "checkpoint.json"
    write_json(path, {"identity": {"recipe": {}, "vocabulary": trained.hash}})
    Checkpoint(path).check_vocabulary(Path("v.json"), trained)
    with refused("v.json: ids", path):
        Checkpoint(path).check_vocabulary(Path("v.json"), other)


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
        with refused(folder / name, "SHA-256", f"after: rm -r {folder}"):
            draft_weights_file(folder)
        (folder / name).write_bytes(before)
        draft_weights_file(folder)
    write_draft(folder, published, {"stage": "long"})
    draft_weights_file(folder)
