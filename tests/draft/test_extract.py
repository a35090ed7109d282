"""Draft folders from every kind of checkpoint; of the target nothing is read but its config.json."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspec.atomic_files import describe_files, read_json, sha256_file, write_json
from longspec.config import compose, yaml_files
from longspec.draft.__main__ import main
from longspec.draft.trained import check_vocabulary
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.glide.layer import UNUSED
from longspec.train.checkpoint import checkpoint_dir, save_load
from tests.damaged import FILES
from tests.draft.conftest import Extract


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


def whole_model(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft's tensors among a target's, and names that hold the prefix elsewhere."""
    others = ["model.embed_tokens.weight", "lm_head.weight", "model.draft_model.mlp.up_proj.weight", "xdraft_model.norm"]
    return {f"draft_model.{name}": t for name, t in state.items()} | {name: torch.ones(3) for name in others}


def write_split(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The same in two files and their index."""
    where = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    write_json(index, {"weight_map": where})
    return index


@pytest.mark.parametrize("kind", [".pth", ".safetensors", ".index.json"])
def test_from_a_state_dict(
    state: dict[str, Tensor], extract: Extract, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = whole_model(state)
    if kind == ".index.json":
        path = write_split(tmp_path, tensors)
    elif kind == ".safetensors":
        save_file(tensors, path := tmp_path / "model.safetensors")
    else:
        torch.save(tensors, path := tmp_path / f"model{kind}")
    assert_equal(extract(path), state)
    assert "left out: 1 of lm_head.*, 2 of model.*, 1 of xdraft_model.*" in capsys.readouterr().out
    config = read_json(tmp_path / "draft/config.json")
    assert config["num_parameters"] == sum(tensor.numel() for tensor in state.values())
    assert (config["stage"], config["settings"]["window"], config["target"]["hidden_size"]) == ("base", 512, 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"module.draft_model.a": torch.ones(1)}, "no name begins with draft_model.; it holds 1 other tensors, such as module"),
        ([torch.ones(1)], "not a state dict of tensors by name"),
    ],
)
def test_what_is_no_state_dict_of_a_draft(extract: Extract, tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "model.pth")
    with pytest.raises(SystemExit, match=message):
        extract(tmp_path / "model.pth")


def test_a_missing_file_or_tensor_of_a_split_state_dict_is_named(
    state: dict[str, Tensor], extract: Extract, tmp_path: Path
) -> None:
    index = write_split(tmp_path, whole_model(state))
    listed = read_json(index)["weight_map"]
    name = next(name for name, file in listed.items() if file == "model-0.safetensors" and name.startswith("draft_model."))
    write_json(index, {"weight_map": listed | {name: "model-1.safetensors"}})
    with pytest.raises(SystemExit, match=f"{name}: not in the files"):
        extract(index)
    write_json(index, {"weight_map": listed})
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"model-1\.safetensors: missing, though"):
        extract(index)


def test_damaged_weights_are_named_in_one_line(state: dict[str, Tensor], extract: Extract, tmp_path: Path) -> None:
    name = "nan.pth"
    (tmp_path / name).write_bytes(FILES[name]({f"draft_model.{key}": tensor for key, tensor in state.items()}))
    with pytest.raises(SystemExit) as refusal:
        extract(tmp_path / name)
    assert str(refusal.value).startswith(f"error: {tmp_path / name}: ")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("name", ["nothing", "folder", "status.json"])
def test_what_is_no_source(extract: Extract, tmp_path: Path, name: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    elif name != "nothing":
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit, match=r"no such file|holds no weights that are known|of a finished stage"):
        extract(tmp_path / name)


def write_slot(folder: Path, state: dict[str, Tensor], ranks: int, **more: object) -> Path:
    """A slot as ZeRO-3 leaves it: an equal part of each tensor on every rank."""
    folder.mkdir(parents=True)
    names = [save_load.shard_name(rank) for rank in range(ranks)]
    for rank, file in enumerate(names):
        tensors = {}
        for name, tensor in state.items():
            each = -(-tensor.numel() // ranks)
            part = tensor.flatten()[rank * each : (rank + 1) * each]
            if part.numel():
                tensors[save_load.shard_key("fp32", f"draft_model.{name}", rank * each)] = part
        begin = save_load.header({key: tensor.numel() for key, tensor in tensors.items()}, {})
        save_load.write_shard(folder / file, begin, tensors.values())
    shapes = {f"draft_model.{name}": list(tensor.shape) for name, tensor in state.items()}
    content = {"step": 5, "shapes": shapes, "files": describe_files(folder, names), **more}
    (folder / checkpoint_dir.MANIFEST).write_text(json.dumps(checkpoint_dir.seal(content)))
    return folder


def test_from_a_finished_stage_of_any_number_of_ranks(state: dict[str, Tensor], extract: Extract, tmp_path: Path) -> None:
    slot = write_slot(tmp_path / "checkpoints/last", state, 3)
    assert_equal(extract(slot), state)
    named = {"slot": "checkpoints/last", "manifest_sha256": sha256_file(slot / checkpoint_dir.MANIFEST)}
    write_json(tmp_path / "checkpoint.json", named)
    assert_equal(extract(tmp_path / "checkpoint.json"), state)
    (slot / save_load.shard_name(1)).rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match=r"rank_00001\.safetensors: missing"):
        extract(slot)
    write_json(tmp_path / "checkpoint.json", named | {"manifest_sha256": "0"})
    with pytest.raises(SystemExit, match="is not the checkpoint that"):
        extract(tmp_path / "checkpoint.json")


@pytest.mark.parametrize(("source", "draft"), [("checkpoint.json", "draft"), ("checkpoints/last", "draft-last")])
def test_of_the_workflows_own_checkpoints_nothing_else_is_asked(
    state: dict[str, Tensor], extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, draft: str
) -> None:
    """`extract` is asked for: it has written the target's configuration. An edit of the recipe comes too late, and a torn
    runtime.yaml is not taken for what a finished stage was run by.
    """
    recipe = OmegaConf.to_container(compose("train", ["run=demo", "recipe.draft.lag=3"]).recipe)
    del recipe["draft"]["temperature"]  # type: ignore[index,union-attr]  # as if a later version had added it
    stage = tmp_path / "results/demo/variant/stage"
    slot = write_slot(stage / "checkpoints/last", state, 2, identity={"recipe": recipe})
    named = {"slot": "checkpoints/last", "manifest_sha256": sha256_file(slot / checkpoint_dir.MANIFEST)}
    write_json(stage / "checkpoint.json", named | {"identity": {"recipe": recipe}, "runtime": {"micro_batch": 3}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"recipe\.yaml: is not what .* was trained by: draft\.lag: 3 -> 4"):
        extract(stage / source)
    monkeypatch.setattr("sys.argv", ["draft", "extract", str(stage / source)])
    with pytest.raises(SystemExit, match=r"models/demo/target_manifest\.json: no such file; make it first"):
        main()
    write_json(tmp_path / "models/demo/target_manifest.json", {"path": str(tmp_path / "target")})
    (tmp_path / "target/tokenizer.json").write_text("{}")
    (stage / "runtime.yaml").write_text("micro_batch: 3\n" if "last" in source else "micro_batch: 3\nlog_target_loss: tru")
    main()
    assert read_json(stage / draft / "config.json")["settings"]["lag"] == 3
    assert (stage / draft / "tokenizer.json").read_text() == "{}"
    told = yaml_files.read(stage / draft / "training_config.yaml")["base"]
    assert (told["recipe"]["draft"]["lag"], told["runtime"]) == (3, {"micro_batch": 3})
    written = load_file(stage / draft / "model.safetensors")
    assert_equal({name: tensor for name, tensor in written.items() if name not in UNUSED}, state)


def test_of_other_sources_recipe_and_folder_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["draft", "extract", str(tmp_path / "model.safetensors")])
    with pytest.raises(SystemExit, match="says nothing of its recipe and its stage; give --recipe and --out"):
        main()


def test_another_vocabulary_than_the_trained_one_is_refused(tmp_path: Path) -> None:
    """A head's rows say the tokens that it was trained with, whichever file of that size is given."""
    trained, other = (DraftVocabulary(ids, 97, "t", {"all": 1.0}) for ids in ((3, 5), (3, 6)))
    path = tmp_path / "checkpoint.json"
    write_json(path, {"identity": {"recipe": {}, "vocabulary": trained.hash}})
    check_vocabulary(path, Path("v.json"), trained)
    told = f"v.json: ids: are not those that {path} was trained with, so that its head would say other tokens; give the file"
    with pytest.raises(ValueError, match=re.escape(told)):
        check_vocabulary(path, Path("v.json"), other)
    check_vocabulary(tmp_path / "state.safetensors", Path("v.json"), other)  # says nothing of its training


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize(("suffix", "zipped"), [("pth", True), ("pt", False)])
def test_a_payload_does_not_run(extract: Extract, state: dict[str, Tensor], tmp_path: Path, suffix: str, zipped: bool) -> None:
    file, made = tmp_path / f"model.{suffix}", tmp_path / "made by a payload"
    torch.save(whole_model(state) | {"draft_model.a": Payload(made)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(SystemExit, match=rf"{suffix}: holds more than tensors.*wants posix\.mkdir.*; save its tensors alone"):
        extract(file)
    assert not made.exists()
    torch.load(file, weights_only=False)
    assert made.is_dir()  # it would have been made
