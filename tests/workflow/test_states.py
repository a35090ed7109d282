"""Stored states in the graph: who reads which, what makes them again, and that nobody misses those that were removed."""

import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from longspec.atomic_files import write_json
from longspec.config import CONFIG_DIR, compose_stage, plain, to_yaml
from longspec.train import stage_folder
from longspec.train.checkpoint.checkpoint_dir import seal
from longspec.workflow.states import StatesPlan
from tests.workflow.planning import FILE, Settings, Workflow, build_all, copy_to

pytestmark = pytest.mark.slow  # half a minute and more as a whole

RUN = "demo-eagle3-offline"
STAGES = ("base", "long", "longcot")
LONG = "config/run/demo-eagle3.yaml:long"
CHANGED = (LONG, r"\blr: [^,}]+", "lr: 7.7e-3")
WORKFLOW = str(FILE)


def folders(settings: Settings, *runs: str) -> dict[str, str]:
    """The folder of each offline stage."""
    states = StatesPlan(settings.plan(runs=list(runs)))
    return {"/".join(stage): folder for folder, stages in states.readers.items() for stage in stages}


def another(folder: Path, name: str, more: str = "") -> None:
    """A run as this one, but for some settings."""
    (folder / f"config/run/{name}.yaml").write_text(f"base: {RUN}\n{more}")


def test_stages_and_runs_that_declare_the_same_share(settings: Settings) -> None:
    alone = folders(settings, RUN)
    assert [path.split("/")[3] for path in alone.values()] == [
        "stdlib-base-512-split", "stdlib-long-long-nomask-4096-split", "puzzles-longcot-2048-split"
    ]  # fmt: skip
    another(settings.folder, "again", more="recipe: {seed: 7, optimizer: {lr: 3.0e-3}, draft: {decay: 0.5}}\n")
    both = folders(settings, RUN, "again")
    assert [both[f"again/ttt/{stage}"] for stage in STAGES] == [both[f"{RUN}/ttt/{stage}"] for stage in STAGES]


def test_the_likeliest_tokens_are_those_of_a_vocabulary(settings: Settings) -> None:
    """A vocabulary that a run takes over is the lender's, so that both share."""
    top = "recipe: {states: {top_k: 16}"
    another(settings.folder, "lends", more=f"{top}}}\n")
    another(settings.folder, "takes", more=f"{top}, method: {{vocabulary_from: lends}}}}\n")
    another(settings.folder, "counts", more=f"{top}}}\n")
    found = folders(settings, "lends", "takes", "counts")
    assert found["takes/ttt/base"] == found["lends/ttt/base"] != found["counts/ttt/base"]
    states = StatesPlan(settings.plan(runs=["takes"]))
    (names,) = [folder.split("/")[2:] for folder in states.readers if "/stdlib-base" in folder]
    assert states.vocabulary(*names) == ["results/lends/ttt/draft_vocabulary_768.json"]
    another(settings.folder, "fewer", more=f"{top}, method: {{vocabulary: 512, vocabulary_from: lends}}}}\n")
    states = StatesPlan(settings.plan(runs=["fewer"]))
    fewer = [folder.split("/")[2:] for folder, stages in states.readers.items() if stages[0][0] == "fewer"]
    assert fewer
    assert all(states.vocabulary(*names) == ["results/lends/ttt/draft_vocabulary_512.json"] for names in fewer)


def test_a_run_may_mix_and_stages_with_anchors_stay_online(settings: Settings) -> None:
    states = StatesPlan(settings.plan(runs=["demo-offline"]))
    stage = ("demo-offline", "sinkpi-slicing")
    assert states.states(*stage, "base") == []
    assert states.options(*stage, "base") == []
    assert states.states(*stage, "long") == ["results/demo-offline/sinkpi-slicing/long/states.json"]
    settings.edit("config/run/demo-offline.yaml:base", r"\Z", "recipe: {draft: {start: random}, states: {source: offline}}\n")
    place = "run 'demo-offline', variant 'sinkpi-slicing', stage 'base': recipe.draft.anchors: random"
    settings.refuses(place, "recipe.states.source: online", "recipe.draft.anchors: off", runs=["demo-offline"])


def frozen(settings: Settings, run: str, *stages: str, trained: bool) -> None:
    """Have the frozen recipes of a run's stages and their copies of contents, and their checkpoints where they are trained."""
    for stage in stages:
        folder = settings.folder / f"results/{run}/ttt/{stage}"
        folder.mkdir(parents=True, exist_ok=True)
        recipe = compose_stage(run, "ttt", stage, settings.folder / "config").recipe
        (folder / "recipe.yaml").write_text(to_yaml(recipe))
        (folder / "states.json").write_text(StatesPlan(settings.plan(runs=[run])).read(f"{run}/ttt/{stage}")[0])
        if trained:
            write_json(folder / "checkpoint.json", {"identity": {"recipe": plain(recipe), "init_weights": None}})


def test_states_are_removed_when_the_stages_of_all_runs_are_trained_on_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    another(settings.folder, "begun")
    states = StatesPlan(settings.plan(runs=[RUN]))
    base, long, longcot = folders(settings, RUN).values()
    for folder in (base, long, longcot):
        (settings.folder / folder / "0-of-2").mkdir(parents=True)
        (settings.folder / folder / "0-of-2/shard.json").touch()
    frozen(settings, RUN, "base", "long", trained=True)
    frozen(settings, "begun", "base", trained=False)
    assert StatesPlan(settings.plan(runs=[RUN], keep_states=True)).remove_unneeded() == []
    (settings.folder / "results/begun/ttt/base/states.json").unlink()  # its states are being built
    assert states.remove_unneeded() == []  # a stage of another run has begun on such states
    frozen(settings, "begun", "base", trained=True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=InterruptedError))  # killed there
        with pytest.raises(InterruptedError):
            states.remove_unneeded()
    assert not (settings.folder / base / "0-of-2/shard.json").exists()
    assert states.remove_unneeded() == [base, long]
    frozen(settings, RUN, "longcot", trained=True)
    settings.edit(*CHANGED)  # long, and with it longcot, is to be trained again
    assert StatesPlan(settings.plan(runs=[RUN])).remove_unneeded() == []
    assert list((settings.folder / "data/states/demo").glob("*/*")) == [settings.folder / longcot]


def test_a_stage_is_trained_if_it_began_with_the_draft_that_is_there(settings: Settings) -> None:
    """base was trained again, and the call stopped before long: what says long's own recipe is of the weights before. Where the
    target lies is no matter.
    """
    frozen(settings, RUN, "base", "long", trained=True)
    states = StatesPlan(settings.plan(runs=[RUN]))
    long, folder = (RUN, "ttt", "long"), settings.folder / f"results/{RUN}/ttt"
    assert states.is_trained(long)
    write_json(folder / "base/draft_manifest.json", {"files": {"model.safetensors": {"sha256": "now"}}})
    recipe = plain(states.plan.configs[long].recipe)
    for begun_with, source, trained in (("then", "build", False), ("now", "build", True), ("now", "/elsewhere", True)):
        moved = recipe | {"model": recipe["model"] | {"source": source}}
        write_json(folder / "long/checkpoint.json", {"identity": {"recipe": moved, "init_weights": begun_with}})
        assert states.is_trained(long) == trained


def test_a_trained_stage_is_known_by_its_last_checkpoint_and_by_the_precision_it_had(settings: Settings) -> None:
    """Snakemake removes checkpoint.json before a job; one that was to find all trained may be stopped there."""
    recipe, base = plain(compose_stage(RUN, "ttt", "base").recipe), settings.folder / "base"
    bf16, fp32 = {"precision": "bf16"}, {"precision": "fp32"}
    for step, had, now, trained in (
        (9, {}, {}, False), (10, {}, {}, True), (10, {"seed": 7}, {}, False), (10, {}, bf16, True), (10, {}, fp32, False),
    ):  # fmt: skip
        identity = {"recipe": recipe | had, "init_weights": None, "dtype": "torch.bfloat16"}
        write_json(base / "checkpoints/last/manifest.json", seal({"step": step, "steps": 10, "identity": identity}))
        assert stage_folder.is_trained(base, recipe | now) == trained, (step, had, now)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A copy in which the run is done, its states still there, as another run may have left them."""
    copy = copy_to(tmp_path_factory.mktemp("offline"), root)
    copy.edit(WORKFLOW, r"^runs: \[.*?\]", f"runs: [{RUN}]")
    another(copy.folder, "again")
    for stage in STAGES:
        path = copy.folder / f"results/{RUN}/ttt/{stage}/recipe.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(to_yaml(compose_stage(RUN, "ttt", stage, CONFIG_DIR).recipe))
    build_all(copy)
    return copy.folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Workflow:
    shutil.copytree(trained_once, tmp_path / "trained", symlinks=True)
    return Workflow(tmp_path / "trained")


@pytest.fixture
def removed(trained: Workflow) -> Workflow:
    """The same after its states were removed."""
    shutil.rmtree(trained.folder / "data/states")
    return trained


def rules(plan: dict[str, dict[str, str]], *names: str) -> list[str]:
    """The rules of the planned jobs that are among these, with the stage or the rows of each."""
    found = [(job["rule"], path.split("/")[3]) for path, job in plan.items() if job["rule"] in names]
    return sorted(f"{rule} {of}" for rule, of in found)


def test_a_stage_is_told_of_its_states_and_a_learning_rate_stores_none_again(trained: Workflow) -> None:
    trained.edit(*CHANGED)
    plan = trained.plan()
    assert rules(plan, "train", "build_states") == ["train long", "train longcot"]
    job = plan[f"results/{RUN}/ttt/long/checkpoint.json"]
    folder = r"data/states/demo/stdlib-long-long-nomask-4096-split/hidden-0-1-2-final-bfloat16-\w{8}"
    shards = rf"--states ({folder})/0-of-2/shard\.json \1/1-of-2/shard\.json \1/held-out-1/shard\.json --"
    assert re.search(shards, job["command"])


def test_removed_states_are_not_missed_also_after_a_change_that_is_taken_back(removed: Workflow) -> None:
    """Nor do their keeping and the number of held-out rows train anything again; a second run has its own made again."""
    removed.edit(WORKFLOW, r"^keep_states: false", "keep_states: true")
    removed.edit(LONG, r"held_out_every: 60\}", "held_out_every: 60, held_out_rows: 4}")
    before = (removed.folder / LONG.partition(":")[0]).read_text()
    removed.edit(*CHANGED)
    assert removed.plan()
    (removed.folder / LONG.partition(":")[0]).write_text(before)
    assert removed.plan() == {}
    plan = removed.plan("--config", f"runs=[{RUN},again]")
    assert len(rules(plan, "build_states")) == 9  # two shards of each stage, and held-out rows
    assert {path.split("/")[1] for path, job in plan.items() if job["rule"] in ("train", "stage_states")} == {"again"}
    recipe = removed.folder / f"results/{RUN}/ttt/long/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lr: ", "lr: 7"))  # by a call that was stopped before it trained
    assert rules(removed.plan(), "train", "build_states")[0] == "train long"  # which then ends at once


def test_a_stage_whose_states_were_removed_has_them_made_again(removed: Workflow) -> None:
    """Also those of a later stage, which only its new weights train again; and after a call that was stopped."""
    removed.edit(*CHANGED)
    assert removed.call("final_draft", "--cores=1").returncode != 0  # its first job fails: nothing is built here
    planned = [f"build_states {rows}" for rows in ("puzzles-longcot-2048-split", "stdlib-long-long-nomask-4096-split")]
    found = rules(removed.plan(), "train", "build_states")
    assert found == sorted([*planned * 3, "train long", "train longcot"])


def test_new_rows_or_another_target_have_removed_states_made_again_by_the_second_call(removed: Workflow) -> None:
    """The recipe is the same: Snakemake alone knows, and removes what stages left before their jobs, which find no states."""
    removed.edit("config/model/demo.yaml", r"^  seed: 0", "  seed: 1")
    assert rules(removed.plan(), "train", "build_states") == [f"train {stage}" for stage in STAGES]
    (removed.folder / f"results/{RUN}/ttt/base/checkpoint.json").unlink()
    plan = removed.plan()
    assert len(rules(plan, "build_states")) == 3 * len(rules(plan, "train")) == 9
