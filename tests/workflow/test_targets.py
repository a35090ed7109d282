"""What is known of a target and of a task's prompts before anything runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from longspec.config import Build
from longspec.families import position_limit
from longspec.measure.tasks import Benchmark
from longspec.methods.glide.settings import FAMILIES, TARGETS
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.target.fetch import check_folder
from longspec.workflow.settings.datasets import check_prompts, prompt_files
from longspec.workflow.settings.targets import check_target, sizes_of
from tests.refusals import refused

KEY = "run 'mine', stage 'base': recipe.model"


def model(source: str, family: str = "qwen2") -> Any:
    """A recipe of the method glide."""
    named = SimpleNamespace(name="mine", source=source, family=None, _target_=TARGETS[family])
    return SimpleNamespace(model=named, method=SimpleNamespace(name="glide"))


def write_config(folder: Path, **settings: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_folder_is_taken_with_its_familys_class_alone(tmp_path: Path, family: str) -> None:
    source = write_config(tmp_path / "target", model_type=family)
    check_target(KEY, model(source, family))
    other = next(name for name in FAMILIES if TARGETS[name] != TARGETS[family])
    facts = f"model_type is '{family}'", f"recipe.model._target_ is {TARGETS[other]}", f"to {TARGETS[family]}"
    with refused(f"{KEY}: {source}: config.json", *facts):
        check_target(KEY, model(source, other))


def test_a_folder_that_is_no_target_is_refused(tmp_path: Path) -> None:
    with refused(f"{KEY}.source: nowhere/x", f"folder (seen from {Path.cwd()})"):
        check_target(KEY, model("nowhere/x"))
    with refused(f"{KEY}.source: {tmp_path}", "no config.json"):
        check_target(KEY, model(str(tmp_path)))
    config = tmp_path / "config.json"
    with refused(f"{config}: model_type 'gpt2'", "docs/families.md", "llama, mistral"):
        check_target(KEY, model(write_config(tmp_path, model_type="gpt2")))
    write_config(tmp_path, model_type="phi3", rope_scaling={"type": "longrope"})
    with refused(f"{config}: rope_type 'longrope'", "yarn"):
        check_target(KEY, model(str(tmp_path)))
    config.write_text("[1]")
    with refused(config, "JSON object", "a list"):
        check_target(KEY, model(str(tmp_path)))


def test_quantized_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """By the plan, when the target is taken, and when it is loaded."""
    source = write_config(tmp_path / "target", model_type="qwen2", quantization_config={"quant_method": "fp8"})
    for open_target in (
        lambda: check_target(KEY, model(source)),
        lambda: check_folder(Path(source)),
        lambda: load_target(source, read_target_config(source), torch.float32),
    ):
        with refused(f"{source}/config.json: quantization_config", "(fp8)", "original weights", "docs/families.md"):
            open_target()


def test_a_gguf_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, made = tmp_path / "a.gguf", Path("models/mine/target")
    with refused(f"{KEY}.source: {path}", f"file (seen from {Path.cwd()})"):
        check_target(KEY, model(str(path)))
    path.write_bytes(b"GGUF")
    stage = SimpleNamespace(recipe=model(str(path)))
    check_target(KEY, stage.recipe)
    assert sizes_of(stage) == (None, None, None)
    write_config(made, model_type="llama", max_position_embeddings=64)
    assert sizes_of(stage) == (None, None, 64)
    with refused(f"{KEY}: {made}: config.json", "recipe.model._target_"):
        check_target(KEY, stage.recipe)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, YARN])
def test_positions_are_those_that_training_reads_or_are_left_open(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    config = Qwen2Config(max_position_embeddings=128, rope_scaling=scaling)
    config.save_pretrained(tmp_path)
    told = sizes_of(SimpleNamespace(recipe=model(str(tmp_path))))[2]
    assert told == (None if scaling and scaling["rope_type"] == "yarn" else position_limit(config))
    built = SimpleNamespace(recipe=model("build"), build=Build(layers=2, vocabulary=300, max_position=7))
    assert sizes_of(built) == (2, 300, 7)


def test_a_template_asks_for_fields_that_each_file_has(tmp_path: Path) -> None:
    one, two, empty = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "empty"))
    one.write_text('{"question": "?", "meta": {"title": "a"}, "answers": ["b"], "n": 0}\n{"other": 1}\n')
    two.write_text('{"question": null}\n')
    empty.touch()

    def asked(template: str, *files: Path) -> None:
        check_prompts({"own": Benchmark([str(path) for path in files], 8, template)}, "file")

    asked("{question} {meta.title} {answers.0} {n} {{brace}}", one, empty)
    key = "file: evaluation.tasks.own.template"
    for template in ("{title}", "{meta.titel}", "{answers.1}"):
        with refused(key, f"{template},", f"{one}: line 1;"):
            asked(template, one)
    with refused(key, f"{two}: line 1; its fields: question"):
        asked("{question}", one, two)
    two.write_text("{\n")
    with refused(f"{two}: line 1"):
        asked("{question}", two)


def test_a_path_that_would_be_read_as_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in puts" / "a 'b' $(x) ;\"é.jsonl"
    path.parent.mkdir()
    path.touch()
    assert prompt_files("own", Benchmark(str(path), 8)) == [path]
    braces = path.with_name("{x}.jsonl")
    braces.touch()
    with refused(f"config/workflow.yaml: evaluation.tasks.own.source: {braces}", "braces", "rename"):
        prompt_files("own", Benchmark(str(braces), 8))
