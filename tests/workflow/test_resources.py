"""What a stage's job asks a cluster for, by the profile's limits and an estimate; without Snakemake."""

import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from longspec.config import compose_stage
from longspec.workflow.jobs import resources
from longspec.workflow.jobs.resources import (
    Limits,
    StageNeeds,
    check_block,
    gpus_in,
    limits_of,
    with_gpus,
)

LIMITS = Limits(nodes=1, ranks=8, node_mem=900_000, longest_job=240, tflops=400)


@pytest.fixture
def config() -> Any:
    return compose_stage("demo", "sinkpi-slicing", "base").copy()


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A target's manifest and that of the rows."""
    found = [tmp_path / "target.json", tmp_path / "rows.json"]
    for path in found:
        path.touch()
    return str(found[0]), str(found[1])


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the estimate: 5000 MB and 11 minutes; the file holds what it was asked, a line each time."""
    told, program = tmp_path / "asked.txt", tmp_path / "plan.py"
    program.write_text(
        f"import sys\nopen({str(told)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        'print(\'[{"memory_mb": 5000, "minutes": 11}]\')\n'
    )
    monkeypatch.setattr(resources, "ESTIMATE", [sys.executable, str(program)])
    return told


def test_limits_are_those_of_the_profile_or_the_rules_own() -> None:
    block = {"nodes": "2", "ranks": "8", "node_mem": "900000", "slurm_partition": "gpu"}
    assert limits_of(block) == Limits(nodes=2, ranks=8, node_mem=900_000)
    assert limits_of({}) == Limits(nodes=1, ranks=1, node_mem=8000, longest_job=240, tflops=0)
    with pytest.raises(ValueError, match=r"^set-resources: train: longest_job: 4h is no whole number; profiles/slurm"):
        limits_of({"longest_job": "4h"})
    with pytest.raises(ValueError, match=r"^set-resources: train: ranks: 8 processes, .* gres of train: gpu:h100:4 has 4"):
        limits_of({"ranks": "8", "gres": "gpu:h100:4"})


def test_a_block_that_the_command_line_took_away_is_missed() -> None:
    for rule in ("train", "evaluate"):
        check_block(rule, {})
        check_block(rule, {"slurm_partition": "gpu", "ranks": "8"})
    check_block("train", {"ranks": "8", "gres": "gpu:h100:8"})
    for rule, block in (("train", {"slurm_partition": "h100"}), ("evaluate", {"ranks": "2"})):
        told = rf"^--set-resources {rule}:{next(iter(block))}=\.\.\. takes the place of all that the profile sets for {rule}"
        with pytest.raises(ValueError, match=told):
            check_block(rule, block)


GPUS = [("", 0), ("gpu", 1), ("gpu:8", 8), ("gpu:h100:4", 4), ("nvme:2,gpu:a100_80gb:2", 2), ("shard:3", 0)]


@pytest.mark.parametrize(("gres", "gpus"), GPUS)
def test_gpus_are_read_from_slurms_words(gres: str, gpus: int) -> None:
    assert gpus_in(gres) == gpus


@pytest.mark.parametrize(
    ("batch", "source", "wanted", "shape"),
    [
        (64, "online", None, (2, 8)),
        (4, "online", None, (2, 2)),  # which share the batch
        (17, "online", None, (2, 8)),  # the trainer refuses a batch that does not divide
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
    assert StageNeeds(Limits(nodes=2, ranks=8), False, print).processes(config) == shape


def test_a_smaller_job_asks_for_a_gpu_a_process_and_two_tasks(config: Any) -> None:
    """The executor starts no job by srun that has one task a node."""
    OmegaConf.set_readonly(config, False)
    config.recipe.global_batch, config.runtime.ranks = 64, None
    needs = StageNeeds(LIMITS, False, print)
    given = {"nodes": "1", "ranks": "8", "tasks_per_node": "16", "gres": "'gpu:h100:8,nvme:1'"}

    def asked() -> dict[str, Any]:
        return {name: needs.share(name, given[name], config) for name in needs.SHARED}

    assert asked() == {"nodes": 1, "ranks": 8, "tasks_per_node": 16, "gres": "gpu:h100:8,nvme:1"}
    config.runtime.ranks = 4
    assert asked() == {"nodes": 1, "ranks": 4, "tasks_per_node": 4, "gres": "gpu:h100:4,nvme:1"}
    config.recipe.states.source, config.runtime.ranks = "offline", None
    assert asked() == {"nodes": 1, "ranks": 1, "tasks_per_node": 2, "gres": "gpu:h100:1,nvme:1"}
    assert [with_gpus(gres, 2) for gres in ("gpu", "gpu:a100", "gpu:8")] == ["gpu:2", "gpu:a100:2", "gpu:2"]


def test_without_an_estimate_the_limits_are_asked_for(config: Any, files: tuple[str, str], asked: Path) -> None:
    """In a job, without the profile's tflops, and before there is anything to estimate from."""
    for needs, target in (
        (StageNeeds(LIMITS, False, pytest.fail), files[0]),
        (StageNeeds(Limits(1, 8, 900_000, 240, tflops=0), True, pytest.fail), files[0]),
        (StageNeeds(LIMITS, True, pytest.fail), "nowhere.json"),
    ):
        assert needs.memory("a", config, target, files[1], [], 1) == 900_000
        assert needs.minutes("a", config, target, files[1], [], 1) == 240
    assert not asked.exists()


def test_an_estimate_is_made_once_and_grows_with_the_tries_up_to_the_limits(
    config: Any, files: tuple[str, str], asked: Path
) -> None:
    needs = StageNeeds(LIMITS, True, pytest.fail)
    assert [needs.memory("a", config, *files, [], attempt) for attempt in (1, 2, 1000)] == [5000, 10_000, 900_000]
    assert [needs.minutes("a", config, *files, [], attempt) for attempt in (1, 2, 1000)] == [11, 22, 240]
    [line] = asked.read_text().splitlines()
    assert f"--target {files[0]} --data {files[1]} --recipe " in line
    assert line.endswith("--ranks 8 --node-gpus 8 --longest-job 240 --flops 400000000000000.0")
    needs.memory("another", config, *files, [], 1)
    Path(files[1]).write_text("other rows")
    needs.memory("a", config, *files, [], 1)
    assert len(asked.read_text().splitlines()) == 3


def test_a_stage_that_needs_more_than_a_node_has_says_so(config: Any, files: tuple[str, str], asked: Path) -> None:
    told: list[str] = []
    needs = StageNeeds(Limits(1, 8, 4000, 240, 400), True, told.append)
    assert needs.memory("a", config, *files, [], 1) == 4000
    needs.minutes("a", config, *files, [], 1)
    assert len(told) == 1
    assert told[0].startswith("a needs 5000 MB of each node by its estimate, the profile has node_mem: 4000")


def test_an_estimate_that_fails_leaves_the_limits(config: Any, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a login node without torch, or with a batch that the trainer will refuse."""
    told: list[str] = []
    monkeypatch.setattr(resources, "ESTIMATE", [sys.executable, "-c", "import sys; sys.exit('first\\nlast')"])
    needs = StageNeeds(LIMITS, True, told.append)
    assert (needs.memory("a", config, *files, [], 1), needs.minutes("a", config, *files, [], 1)) == (900_000, 240)
    assert told == ["a: its job asks for node_mem and longest_job, an estimate failed: last"]
