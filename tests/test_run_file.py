"""A run's file: what it derives from another, what it sets of a stage, and what it refuses."""

from pathlib import Path

import pytest

from longspec.config import CONFIG_DIR, compose_stage, stages_of
from longspec.config.run_file import read_run
from tests.refusals import refused

STAGE = "stages:\n  base:\n    recipe: {optimizer: {lr: 3.0e-3}}\n"


def write(folder: Path, **files: str) -> None:
    """Runs by name, in a folder's run/."""
    (folder / "run").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"run/{name}.yaml").write_text(text)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder whose runs may derive from those of config/."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "train.yaml").write_text((CONFIG_DIR / "train.yaml").read_text())
    write(folder, **{path.stem: path.read_text() for path in (CONFIG_DIR / "run").glob("*.yaml")})
    return folder


def test_a_run_that_derives_from_another_has_its_numbers_of_each_stage(config: Path) -> None:
    """Of 61 GiB of weights the published run gives each GPU a share beside 32k tokens."""
    write(config, mine="base: published\ntarget: qwq-32b\n", second="base: mine\n")
    configs = {stage: compose_stage("second", "base", stage, config) for stage in ("base", "long", "longcot")}
    assert [each.runtime.target for each in configs.values()] == ["replicated", "partitioned", "partitioned"]
    assert {each.recipe.model.name for each in configs.values()} == {"qwq-32b"}
    runtime = "{deepspeed: {zero_stage: 3, offload_optimizer: cpu}}"
    write(config, mine=f"base: demo\nruntime: {runtime}\nstages: {{base: , long: {{runtime: {runtime}}}}}\n")
    write(config, third="base: mine\ndeepspeed: zero0\n")
    stages = [compose_stage("third", "base", stage, config).runtime.deepspeed.zero_stage for stage in ("base", "long")]
    assert stages == [0, 0], "what a run says replaces what its base says"
    write(config, mine="base: published\nstages: {base: , long: {runtime: {target: tensor_parallel, micro_batch: 2}}}\n")
    long = compose_stage("second", "base", "long", config)
    assert (long.runtime.target, long.runtime.micro_batch, long.recipe.draft.loss) == ("tensor_parallel", 2, "hard")
    assert stages_of("second", config) == ["base", "long"]


def test_what_is_set_of_a_stage_comes_last_and_mappings_are_merged_key_by_key(config: Path) -> None:
    more = "recipe: {data: {overlong: split}, seed: 7}\n"
    write(config, mine=f"base: demo\n{more}{STAGE}")
    recipe, whole = compose_stage("mine", "base", "base", config).recipe, compose_stage("demo", "base", "base", config).recipe
    assert (recipe.optimizer.lr, recipe.seed, recipe.data.overlong) == (3.0e-3, 7, "split")
    assert (recipe.data.sequence_length, recipe.draft.start) == (whole.data.sequence_length, whole.draft.start)
    write(config, **{"1e5": "base: demo\n"})  # no number to Hydra
    assert compose_stage("1e5", "base", "base", config).recipe == whole


def test_a_stages_data_is_taken_as_a_whole_and_before_recipe_data_name(config: Path) -> None:
    mixes = [{"stdlib": 0.7, "puzzles": 0.3}, {"stdlib": 0.5, "stdlib-long": 0.5}]
    write(config, mine=f"base: demo\nstages: {{base: {{data: {mixes[0]}}}}}\n")
    write(config, second=f"base: mine\nstages: {{base: {{data: {mixes[1]}}}}}\n")
    assert [compose_stage(run, "base", "base", config).recipe.data.name for run in ("mine", "second")] == mixes


def test_what_a_run_says_replaces_what_its_base_says_of_a_stage(config: Path) -> None:
    """Also where it says so for all stages, and mixes as a whole."""
    write(config, mine="base: demo\nrecipe: {optimizer: {lr: 7.0e-4}, data: {replay: {}}}\n")
    for stage in ("base", "longcot"):
        recipe, whole = (compose_stage(run, "base", stage, config).recipe for run in ("mine", "demo"))
        assert (recipe.optimizer.lr, recipe.data.replay, recipe.steps) == (7.0e-4, {}, whole.steps)
    write(config, second="base: mine\nrecipe: {data: {name: {stdlib-long: 0.5, puzzles: 0.5}}}\nstages: [longcot]\n")
    assert compose_stage("second", "base", "longcot", config).recipe.data.name == {"stdlib-long": 0.5, "puzzles": 0.5}
    write(config, mine="base: demo\nstages: {mine: {data: {stdlib: 0.5, puzzles: 0.5}}}\n")
    for place in ("recipe: {data: {name: puzzles}}", "stages: {mine: {recipe: {data: {name: puzzles}}}}"):
        write(config, second=f"base: mine\n{place}\n")
        assert compose_stage("second", "base", "mine", config).recipe.data.name == "puzzles"


def test_a_mix_of_all_stages_is_not_joined_with_that_of_one(config: Path) -> None:
    write(config, mine="base: demo\nrecipe: {data: {replay: {base: 0.2}, name: {stdlib: 0.5, puzzles: 0.5}}}\n")
    mix = "{stdlib-long: 0.5, puzzles: 0.5}"
    for replay, found in (("{}", {}), ("{stdlib: 0.1}", {"stdlib": 0.1})):
        write(config, second=f"base: mine\nstages: {{long: {{data: {mix}, recipe: {{data: {{replay: {replay}}}}}}}}}\n")
        data = compose_stage("second", "base", "long", config).recipe.data
        assert (data.replay, data.name) == (found, {"stdlib-long": 0.5, "puzzles": 0.5})


def test_of_another_target_the_name_stays_behind_and_of_another_engine_its_keys(config: Path) -> None:
    """Else two targets would share one folder."""
    recipe = "recipe: {model: {name: short, family: llama}, seed: 7}"
    answers = "{chats: {source: a.jsonl, regenerate: {new_tokens: 9, batch: 8}}}"
    write(config, mine=f"target: a-llama\ndata: {answers}\nbuild: {{layers: 2}}\n{recipe}\n")
    other = "data: {chats: {regenerate: {engine: endpoint, endpoint: http://n}}}"
    write(config, second=f"base: mine\ntarget: another\n{other}\n")
    says = read_run("second", [config]).says
    assert (says.recipe, says.build) == ({"seed": 7}, {})
    assert says.data["chats"] == {"source": "a.jsonl", "regenerate": {"engine": "endpoint", "endpoint": "http://n"}}
    write(config, second="base: mine\ntarget: moved\nrecipe: {model: {name: short}}\n")
    assert read_run("second", [config]).says.recipe == {"seed": 7, "model": {"name": "short"}}


def test_of_another_method_the_keys_of_draft_and_method_stay_behind(config: Path) -> None:
    """They are GLIDE's, which EAGLE-3 does not know."""
    write(config, mine="base: demo\nmethod: eagle3\nvariants: [ttt]\nrecipe: {method: {layers: [0, 1, 2], vocabulary: 64}}\n")
    recipe = compose_stage("mine", "ttt", "base", config).recipe
    assert (recipe.method.name, recipe.draft.start, recipe.data.sequence_length) == ("eagle3", "random", 128)
    write(config, mine="base: demo\nmethod: glide\n")
    assert read_run("mine", [config]).says.recipe == {"draft": {"lag": 4}}
    write(config, mine="base: demo-eagle3\nmethod: dflash\n")
    assert (read_run("demo-eagle3", [config]).says.variants, read_run("mine", [config]).says.variants) == (["ttt"], [])


def test_a_stage_may_have_another_name_than_the_numbers_it_begins_with(config: Path) -> None:
    write(config, mine="target: demo\nstages:\n  gentle: {like: base, recipe: {data: {name: stdlib}, seed: 7}}\n")
    recipe = compose_stage("mine", "base", "gentle", config).recipe
    assert (recipe.stage, recipe.seed, recipe.data.name, recipe.global_batch) == ("gentle", 7, "stdlib", 2048)


def test_a_run_is_taken_by_its_path_too(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "apart.yaml"
    path.write_text(f"base: demo\n{STAGE}")
    found = read_run(str(path), [config])
    assert (found.name, found.file) == ("apart", str(path))
    (tmp_path / "run").mkdir()
    own = path.rename(tmp_path / "run/apart.yaml")  # a folder of this name is no config/run
    assert [read_run(str(own), [config]).file, read_run(str(own), [config]).given] == [str(own)] * 2
    path = own
    assert compose_stage(str(path), "base", "base", config).recipe.optimizer.lr == 3.0e-3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stags: [base]\n", ("stags: unknown key", "'stages'?")),
        ("stages: {base: {receipe: {}}}\n", ("stages.base.receipe: unknown key", "'recipe'?")),
        ("stages: [base, base]\n", ("stages", "is ['base', 'base']")),
        ("stages: {'a b': }\n", ("stages: a stage: 'a b'", "letters, digits, dots")),
        ("stages: [lookup]\n", ("stages: lookup", "untrained, lookup, imported, with-lookup")),
        ("recipe: [3]\n", ("recipe", "mapping, is [3]")),
        ("recipe: {model: }\n", ("recipe.model", "mapping, is null")),
        ("stages: {base: {recipe: {data: chats}}}\n", ("stages.base.recipe.data", "mapping, is 'chats'")),
        ("recipe: {data: {replay: }}\n", ("recipe.data.replay", "mapping, is null")),
        ("runtime: {deepspeed: zero1}\n", ("runtime.deepspeed", "mapping, is 'zero1'")),
        ("- demo\n", ("must", "mapping", "target and")),
        ("base: dmo\n", ("base", "config/run/dmo.yaml", "'demo'?")),
        ("base: mine\n", ("base: mine -> mine",)),
        ("final: lats\n", ("final: 'lats'", "best, last")),
    ],
)
def test_what_no_run_says_is_refused_with_its_key(config: Path, text: str, told: tuple[str, ...]) -> None:
    write(config, mine=text)
    with refused(f"config/run/mine.yaml: {told[0]}", *told[1:]):
        read_run("mine", [config])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("recipe: {optimizer: {rl: 1}}\n", "(in config/run/mine.yaml)"),
        ("stages: {base: {recipe: {optimizer: {rl: 1}}}}\n", "(in config/run/mine.yaml, stage base)"),
    ],
)
def test_what_hydra_refuses_is_told_with_the_runs_file(config: Path, text: str, place: str) -> None:
    write(config, mine=text)
    known = "betas, clip, eps, lr, name, schedule, warmup_ratio, weight_decay."
    with refused("recipe.optimizer.rl: unknown key", known, place):
        compose_stage("mine", "base", "base", config)
