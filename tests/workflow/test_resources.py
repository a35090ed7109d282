"""What a stage's job asks a cluster for by the profile's limits, and how often a failed one is tried again; no Snakemake."""

import json
import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from snakemake_executor_plugin_slurm.utils import set_gres_string
from snakemake_interface_common.exceptions import WorkflowError

from longspec.config import compose_stage
from longspec.workflow.jobs.resources import (
    Limits,
    StageNeeds,
    check_call,
    check_gres,
    gpus_here,
    gpus_in,
    limits_of,
    ranks_for,
    with_gpus,
)
from longspec.workflow.jobs.retries import FRUITLESS, PAUSE, reason_to_give_up, retries
from tests.refusals import refused

LIMITS = Limits(nodes=1, ranks=8, node_mem=900_000, longest_job=240)


@pytest.fixture
def config() -> Any:
    return compose_stage("demo", "sinkpi-slicing", "base").copy()


def test_limits_are_those_of_the_profile_or_the_rules_own() -> None:
    block = {"nodes": "2", "ranks": "8", "node_mem": "900000", "slurm_partition": "gpu"}
    assert limits_of(block) == Limits(nodes=2, ranks=8, node_mem=900_000)
    assert limits_of({}) == Limits(nodes=1, ranks=1, node_mem=8000, longest_job=240)
    with refused("set-resources: train: longest_job: 4h", "profiles/slurm/profile.yaml"):
        limits_of({"longest_job": "4h"})
    with refused("set-resources: train: ranks: 8 processes", "gres of train: gpu:h100:4 has 4"):
        limits_of({"ranks": "8", "gres": "gpu:h100:4"})


def test_a_call_that_takes_the_place_of_a_profiles_settings_is_refused() -> None:
    check_call(
        ["--profile", "slurm", "--set-resource-scopes", "gpu_jobs=global"],
        {"train": ["ranks", "gres"]},
        policy=True,
        slurm=True,
    )
    check_call(["--set-resources", "train:ranks=4"], {"train": ["ranks"]}, policy=True, slurm=False)
    for words in (["--set-resources", "train:ranks=4"], ["--set-resources=dequantize_target:mem_mb=320000"]):
        with refused("--set-resources", "profiles/slurm/profile.yaml", "--profile COPY"):
            check_call(words, {"train": ["ranks"]}, policy=True, slurm=True)
    with refused("rerun-triggers", "profiles/default", "--workflow-profile", "--profile"):
        check_call([], {}, policy=False, slurm=False)
    check_call(["--rerun-triggers", "mtime", "params", "input", "code", "software-env"], {}, policy=False, slurm=False)
    for given in ({"train": ["slurm_partition"]}, {"evaluate": ["mem_mb"]}):
        with refused("set-resources:", "ranks for train", "profiles/slurm/profile.yaml"):
            check_call(["--profile", "slurm", "--profile", "mine"], given, policy=True, slurm=True)


GPUS = {"": 0, "gpu": 1, "gpu:8": 8, "gpu:h100:4": 4, "gpu:a100_80gb:2": 2, "gpu:a100": 1, "shard:3": 0}
REFUSED = ("gpu:h100:8(S:0-1)", "nvme:2,gpu:2", "gpu:a100-sxm4-80gb:8", "gpu:8 ", "gpu:")


@pytest.mark.parametrize("gres", [*GPUS, *REFUSED])
def test_gpus_are_read_from_words_that_the_executor_takes(gres: str) -> None:
    """Of others the plugin of Snakemake would fail each job, before Slurm hears of it."""
    job: Any = SimpleNamespace(resources=SimpleNamespace(gres=gres, get=lambda name: gres if name == "gres" else None))
    if gres in REFUSED:
        with pytest.raises(WorkflowError):
            set_gres_string(job)
        with refused(f"set-resources: evaluate: gres: {gres}", "constraint"):
            check_gres("evaluate", f"'{gres}'")
    else:
        assert gpus_in(gres) == GPUS[gres]
        assert set_gres_string(job) == (f" --gres={gres}" if gres else "")
        check_gres("evaluate", f"'{gres}'")


@pytest.mark.parametrize(
    ("batch", "source", "wanted", "shape"),
    [
        (64, "online", None, (2, 8)),
        (4, "online", None, (2, 2)),  # which share the batch
        (6, "online", None, (2, 3)),
        (3, "online", None, (2, 8)),
        (17, "online", None, (2, 8)),  # which is refused
        (64, "offline", None, (1, 1)),
        (64, "offline", 12, (2, 6)),
        (64, "offline", 64, (2, 8)),  # at most: no more than the profile has
        (64, "online", 3, (1, 3)),
    ],
)
def test_a_stage_has_as_many_processes_as_its_run_says(
    config: Any, batch: int, source: str, wanted: int | None, shape: Any
) -> None:
    """One that reads stored states has no target to run, for which the profile's GPUs are there."""
    OmegaConf.set_readonly(config, False)
    config.recipe.global_batch, config.recipe.states.source, config.runtime.ranks = batch, source, wanted
    assert StageNeeds(Limits(nodes=2, ranks=8)).processes(config) == shape
    assert bool(StageNeeds(Limits(nodes=2, ranks=8)).missing({("run", "glide", "base"): config})) == (wanted == 64)


@pytest.mark.parametrize(("limits", "rows", "more", "fewer"), [((2, 8), 17, 32, 1), ((1, 4), 33, 36, 3), ((1, 2), 9, 10, 1)])
def test_a_batch_that_its_processes_cannot_share_is_refused_with_what_they_can(
    config: Any, limits: tuple[int, int], rows: int, more: int, fewer: int
) -> None:
    OmegaConf.set_readonly(config, False)
    config.recipe.global_batch, config.runtime.ranks = rows, None
    needs, stages = StageNeeds(Limits(*limits)), {("run", "glide", "base"): config}
    with refused("run/glide/base: recipe.global_batch", str(rows), f"to {more}", f"runtime.ranks to {fewer}"):
        needs.check_shares(stages)
    config.runtime.ranks = fewer
    needs.check_shares(stages)
    config.recipe.global_batch, config.runtime.ranks = more, None
    needs.check_shares(stages)


@pytest.mark.parametrize(
    ("rows", "wanted", "ranks"), [((8,), None, 4), ((8, 64), None, 4), ((2,), None, 2), ((6, 12), None, 6), ((64,), 2, 2)]
)
def test_a_machine_without_a_profile_tells_how_many_of_its_gpus_share_every_batch(
    config: Any, tmp_path: Path, rows: tuple[int, ...], wanted: int | None, ranks: int
) -> None:
    stages = []
    for batch in rows:
        stages.append(deepcopy(config))
        OmegaConf.set_readonly(stages[-1], False)
        stages[-1].recipe.global_batch, stages[-1].runtime.ranks = batch, wanted
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidia10", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert ranks_for(stages, gpus_here(tmp_path, {})) == ranks
    assert [gpus_here(tmp_path, {"CUDA_VISIBLE_DEVICES": text}) for text in ("", "2,3", "GPU-5f")] == [0, 2, 1]


def test_a_smaller_job_asks_for_a_gpu_a_process_and_two_tasks(config: Any) -> None:
    """The executor starts no job by srun that has one task a node."""
    OmegaConf.set_readonly(config, False)
    config.recipe.global_batch, config.runtime.ranks = 64, None
    needs = StageNeeds(LIMITS)
    given = {"nodes": "1", "ranks": "8", "tasks_per_node": "16", "gres": "'gpu:h100:8'"}

    def asked() -> dict[str, Any]:
        return {name: needs.share(name, given[name], config) for name in needs.SHARED}

    assert asked() == {"nodes": 1, "ranks": 8, "tasks_per_node": 16, "gres": "gpu:h100:8"}
    assert needs.memory(config) == 900_000
    config.runtime.ranks = 4
    assert asked() == {"nodes": 1, "ranks": 4, "tasks_per_node": 4, "gres": "gpu:h100:4"}
    config.recipe.states.source, config.runtime.ranks = "offline", None
    assert asked() == {"nodes": 1, "ranks": 1, "tasks_per_node": 2, "gres": "gpu:h100:1"}
    assert needs.memory(config) == 112_500
    assert [with_gpus(gres, 2) for gres in ("gpu", "gpu:a100", "gpu:8")] == ["gpu:2", "gpu:a100:2", "gpu:2"]


BEGAN = 1000.0


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    (tmp_path / "stage").mkdir()
    return tmp_path / "stage"


def put(path: Path, time: float, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time, time))


def given_up(stage: Path) -> str:
    return reason_to_give_up(stage, stage.parent / "logs/stage.log", BEGAN)


def attempts(stage: Path, *times: float) -> None:
    for number, time in enumerate(times, start=1):
        put(stage.parent / f"logs/stage/attempt-{number:03d}-job-{number}.log", time)


@pytest.mark.parametrize(
    ("status", "time", "expected"),
    [
        ({"state": "failed", "deterministic": True, "reason": "no such key"}, BEGAN + 1, "in the same way again: no such key"),
        ({"state": "failed", "deterministic": True, "reason": "mended since"}, BEGAN - 1, ""),
        ({"state": "failed", "deterministic": False, "reason": "a rank was lost"}, BEGAN + 1, ""),
    ],
)
def test_what_the_stage_itself_says(stage: Path, status: dict[str, object], time: float, expected: str) -> None:
    assert given_up(stage) == ""
    put(stage / "status.json", time, json.dumps(status))
    assert given_up(stage).endswith(expected)
    assert bool(given_up(stage)) == bool(expected)
    told = retries("train", 50, 1, stage / "checkpoint.json", stage.parent / "logs/stage.log", BEGAN, {})
    assert told == ((0, 0, given_up(stage)) if expected else (50, PAUSE, ""))


def test_tries_without_a_checkpoint_are_counted_from_the_last_one(stage: Path) -> None:
    ends = [BEGAN + 10 * number for number in range(1, FRUITLESS + 1)]
    attempts(stage, *ends[:-1])
    assert given_up(stage) == ""
    attempts(stage, *ends)
    assert f"{FRUITLESS} tries in a row" in given_up(stage)
    put(stage / "checkpoints/last_2/manifest.json", BEGAN + 5)  # the first of them saved: the others were in vain
    assert given_up(stage) == ""
    attempts(stage, *ends, ends[-1] + 1)
    assert f"{FRUITLESS} tries in a row" in given_up(stage)
    put(stage / "checkpoints/last/manifest.json", ends[-1])
    assert given_up(stage) == ""


def test_a_stage_that_gets_on_has_no_last_try_but_jobs_that_never_begin_have_one(stage: Path) -> None:
    """Snakemake sends a job again while its tries are as many as its attempts."""
    log, ends = stage.parent / "logs/stage.log", [BEGAN + 10 * number for number in range(1, 8)]
    attempts(stage, *ends)
    put(stage / "checkpoints/last/manifest.json", ends[-1])
    for attempt, tries, pause in ((7, 10, 0), (8, 10, PAUSE)):
        assert retries("train", 3, attempt, stage / "checkpoint.json", log, BEGAN, {}) == (tries, pause, "")
    assert retries("train", 3, 4, stage / "checkpoint.json", log.with_name("none.log"), BEGAN, {}) == (3, PAUSE, "")


def test_a_job_that_starts_from_the_beginning_has_two_tries_more() -> None:
    for allowed, tries in ((50, 2), (1, 1)):
        assert retries("pack", allowed, 1, Path("manifest.json"), Path(), BEGAN, {}) == (tries, PAUSE, "")


@pytest.mark.parametrize(
    ("rule", "output", "saved"),
    [
        ("answer", "0-of-2/shard.json", "0-of-2/journal.jsonl"),
        ("build_states", "0-of-2/shard.json", "0-of-2/rows-0-7.safetensors"),
        ("evaluate", "base.jsonl", "base.unfinished.jsonl"),
    ],
)
def test_a_job_that_resumes_is_given_up_after_ten_tries_that_saved_nothing(
    tmp_path: Path, rule: str, output: str, saved: str
) -> None:
    """Each attempt in turn, by the bytes that stand there when it has failed; its tries are as many as Snakemake allows."""
    seen: dict[Path, tuple[int, int]] = {}
    tries = []
    for attempt, size in enumerate([0, 10, 10, *[500] * 11], start=1):
        put(tmp_path / saved, BEGAN, "x" * size)
        put(tmp_path / "other.unfinished.jsonl", BEGAN, "x" * attempt)  # another evaluation's
        tries.append(retries(rule, 50, attempt, tmp_path / output, Path(), BEGAN, seen)[0])
    assert tries == [9, 11, 11, *[13] * 11]  # the last attempt is the fourteenth: ten behind the fourth saved nothing
    assert retries(rule, 3, 1, tmp_path / "another/shard.json", Path(), BEGAN, seen)[0] == 3
