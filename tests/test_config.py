"""The configuration: the published experiments against their published figures, freezing, and refusals."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from longspec import families, methods
from longspec.config import CONFIG_DIR, Recipe, Runtime, compose, compose_stage, differences, load, plain, to_yaml, typed
from longspec.methods.glide.settings import FAMILIES
from tests.refusals import refused

NAME = "qwq_glide_8gpu_slim6b"
LONG = "_longv2-32k-zero3_5e-6-ligce-nomask"
LONGCOT = "_longcot_5e-6"
SINK = "_sinkpi-slicing"
GPUS = 8

# Published figures by stage: dataset, tokens in a row, labels, learning rate, ZeRO stage (optimizer offloaded in all),
# rows of one forward, forwards in a step.
STAGES: dict[str, tuple[str, int, str, float, int, int, int]] = {
    "base": ("slimpajama", 1024, "base", 5e-4, 1, 2, 128),
    "long": ("long-data", 32768, "long-nomask", 5e-6, 3, 1, 8),
    "longcot": ("longcot", 32768, "longcot", 5e-6, 3, 1, 32),
}

# Experiment: stage, variant, and the experiment whose draft it starts from.
EXPERIMENTS: dict[str, tuple[str, str, str | None]] = {
    NAME: ("base", "base", None),
    NAME + LONG: ("long", "base", NAME),
    NAME + LONG + LONGCOT: ("longcot", "base", NAME + LONG),
    NAME + SINK: ("base", "sinkpi-slicing", None),
    NAME + SINK + LONG: ("long", "sinkpi-slicing", NAME + SINK),
    NAME + SINK + LONG + LONGCOT: ("longcot", "sinkpi-slicing", NAME + SINK + LONG),
    NAME + SINK + LONGCOT: ("longcot", "sinkpi-slicing", NAME + SINK),
}


def experiment(name: str) -> Any:
    """One published experiment, composed."""
    return compose(name, [], CONFIG_DIR / "exp")


def test_the_published_names_are_all_there() -> None:
    files = {path.stem for path in (CONFIG_DIR / "exp").glob("[!_]*.yaml")}
    assert files == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_published_experiment_has_its_published_figures(name: str) -> None:
    stage, variant, before = EXPERIMENTS[name]
    data, length, collation, lr, zero, micro_batch, accumulation = STAGES[stage]
    config = experiment(name)
    recipe, runtime = config.recipe, config.runtime
    assert recipe.stage == stage
    assert (recipe.data.name, recipe.data.sequence_length, recipe.data.collation) == (data, length, collation)
    assert recipe.model.name == "qwq-32b-preview"
    assert recipe.model._target_ == "longspec.train.models.qwen2_glide.Qwen2Glide.from_pretrained"
    optimizer = {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "warmup_ratio": 0.1, "clip": 1.0}
    assert recipe.optimizer == optimizer | {"name": "adamw", "schedule": "cosine"}
    assert recipe.global_batch == micro_batch * accumulation * GPUS
    assert (runtime.micro_batch, runtime.save_every) == (micro_batch, 200)
    assert runtime.deepspeed == {"zero_stage": zero, "offload_optimizer": "cpu", "nvme_path": None}
    assert (recipe.epochs, recipe.steps, recipe.seed, recipe.draft.loss) == (1, None, 42, "hard")
    assert (recipe.draft.window, recipe.draft.lag) == (512, 4)
    switches = {"base": ("off", "blocks"), "sinkpi-slicing": ("random", "random")}
    assert (recipe.draft.anchors, recipe.draft.lag_mode) == switches[variant]
    assert config.files.init_weights == (before and f"results/{before}/draft/model.safetensors")
    assert config.files.out == f"results/{name}"
    assert config.files.target == "models/qwq-32b-preview/target_manifest.json"
    assert runtime.extract_at_end
    assert before is None or experiment(before).recipe.draft == recipe.draft
    overlong = recipe.data.overlong
    assert config.files.data == f"data/packed/qwq-32b-preview/{data}-{collation}-{length}-{overlong}/manifest.json"


@pytest.mark.parametrize("stage", STAGES)
def test_the_published_run_of_the_workflow_is_the_published_experiment(stage: str) -> None:
    """Of the runtime all but the draft at the end, which the workflow has a rule for."""
    name = next(name for name, (of, variant, _) in EXPERIMENTS.items() if of == stage and variant == "sinkpi-slicing")
    ours = compose_stage("published", "sinkpi-slicing", stage)
    recipes = [OmegaConf.to_container(config.recipe) for config in (experiment(name), ours)]
    assert recipes[0] == recipes[1]
    runtimes = [OmegaConf.to_container(config.runtime) for config in (experiment(name), ours)]
    assert differences(*runtimes) == ["extract_at_end: True -> False"]  # type: ignore[arg-type]


def test_a_frozen_recipe_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(compose_stage("demo", "base", "base").recipe) + "colour: red\n")
    with refused(path, "this version: colour"):
        load(path, Recipe)


def test_every_family_has_a_method_and_no_method_another_family() -> None:
    taken = {family for name in methods.names() for family in methods.settings_of(name).FAMILIES}
    assert taken == set(families.FAMILIES)


def test_a_method_refuses_a_family_by_name_and_says_which_takes_it() -> None:
    family = min(set(families.FAMILIES) - set(FAMILIES))
    takes = re.compile(f"{family} targets: .* llama, mistral, qwen2, qwen3, qwen3_moe; for {family} .* dflash or eagle3$")
    with refused("recipe.model.family", "glide", takes):
        compose("train", [f"recipe.model.family={family}"])
    recipe = compose("train", ["run=demo-eagle3", f"recipe.model.family={family}"]).recipe
    assert (recipe.model.family, recipe.model._target_) == (family, None)
    methods.check_family_named(recipe, family, "there")


GOLDEN = Path(__file__).parent / "golden"
# What was composed and what its frozen sections hashed to before there were methods: a change trains finished stages anew.
FROZEN: dict[str, dict[str, str]] = json.loads((GOLDEN / "frozen.json").read_text())


@pytest.mark.parametrize("composed", FROZEN)
def test_a_stages_frozen_text_stays_what_it_was(composed: str, root: Path) -> None:
    """Every run, variant and stage of the workflow and of benchmarks/, every model and way of sharing, the experiments."""
    name, *overrides = composed.split()
    config = compose(name, overrides, root / "benchmarks/config" if name == "train" else CONFIG_DIR / "exp")
    texts = {section: to_yaml(config[section]) for section in FROZEN[composed]}
    assert {section: hashlib.sha256(text.encode()).hexdigest() for section, text in texts.items()} == FROZEN[composed], texts


NEWER = {  # than these texts
    *("demo-dflash", "smollm2-dflash", "blocks"),
    *("demo-eagle3", "ttt", "qwen3-30b-a3b", "llama-3.3-70b", "smollm2-135m", "qwq-32b-preview"),
    *("llama3.1-8b-eagle3", "qwen3-8b-eagle3", "qwen3-30b-a3b-eagle3", "llama3.3-70b-eagle3"),
    *("demo-offline", "demo-eagle3-offline", "llama3.1-8b-eagle3-offline"),
    *("smollm2-glide", "smollm2-eagle3", "smollm2-eagle3-gsm8k"),
    *("llama3.1-8b-eagle3-sharegpt", "llama3.1-8b-eagle3-sharegpt-offline"),
    *("methods", "demo-glide", "demo-eagle3-window", "demo-dflash"),
    *("smollm2-methods", "smollm2-eagle3-window"),
}


def test_the_frozen_texts_are_of_everything_that_can_be_composed(root: Path) -> None:
    words = {word for composed in FROZEN for word in composed.split()}
    for group in ("run", "variant", "model", "exp"):
        names = {path.stem for place in (CONFIG_DIR, root / "benchmarks/config") for path in place.glob(f"{group}/[!_]*.yaml")}
        assert {name if group == "exp" else f"{group}={name}" for name in names - NEWER} <= words


@pytest.mark.parametrize("stage", ["base", "long", "longcot"])
@pytest.mark.parametrize(("section", "schema"), [("recipe", Recipe), ("runtime", Runtime)])
def test_the_demos_frozen_files_are_composed_and_read_back_letter_by_letter(stage: str, section: str, schema: type) -> None:
    path = GOLDEN / f"demo/{stage}.{section}.yaml"
    composed = compose_stage("demo", "sinkpi-slicing", stage)[section]
    assert to_yaml(composed) == path.read_text()
    assert load(path, schema) == composed
    assert to_yaml(load(path, schema)) == path.read_text()


QWEN2 = "longspec.train.models.qwen2_glide.Qwen2Glide.from_pretrained"
OLD_MODEL = f"""# @package recipe.model
_target_: {QWEN2}
name: qwq-32b
source: hf:Qwen/QwQ-32B
"""


def test_a_model_file_that_names_its_class_says_family_and_method(tmp_path: Path) -> None:
    """As model files did before there were methods."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/own.yaml").write_text(OLD_MODEL)
    (tmp_path / "own.yaml").write_text("defaults:\n  - train\n  - override model: own\n  - _self_\n")
    old, new = compose("own", [], tmp_path), compose("train", ["model=qwq-32b"])
    assert to_yaml(old.recipe) == to_yaml(new.recipe)
    assert old.recipe == new.recipe
    assert old.recipe.method.name == "glide"
    assert methods.of_target(old.recipe.model._target_) == ("glide", "qwen2")


def test_unknown_and_contradicting_names_of_family_and_method_are_refused_by_key() -> None:
    """When they are composed, and in a frozen recipe."""
    known = ("recipe.method.name: 'eagle'", "dflash, eagle3, glide")
    for overrides, told in (
        (["recipe.model.family=gpt2"], ("recipe.model.family: 'gpt2'", "llama, mistral, qwen2, qwen3")),
        (
            ["recipe.model.family=llama", f"recipe.model._target_={QWEN2}"],
            ("recipe.model.family: llama", f"recipe.model._target_ is {QWEN2}"),
        ),
        (["recipe.method.name=eagle"], known),
    ):
        with refused(*told):
            compose("train", overrides)
    content: Any = plain(compose("train", []).recipe)
    source = Path("recipe.yaml")
    assert typed(content, Recipe, source).method.name == "glide"
    with refused(f"{source}: {known[0]}", *known[1:]):
        typed(content | {"method": {"name": "eagle"}}, Recipe, source)
    model = {"name": "demo", "source": "build"}
    with refused(f"{source}: recipe.method.name: missing", "recipe.model._target_"):
        typed(content | {"model": model}, Recipe, source)
