"""What a stage's job asks a cluster for, by the profile's limits and an estimate; without Snakemake."""

import sys
from pathlib import Path
from typing import Any

import pytest

from longspec.config import compose_stage
from longspec.workflow.jobs import resources
from longspec.workflow.jobs.resources import Limits, StageNeeds, check_block, gpus_in, limits_of

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


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("", 0),
        ("gpu", 1),
        ("gpu:8", 8),
        ("gpu:h100:4", 4),
        ("gpu:h100", 1),
        ("nvme:2,gpu:a100_80gb:2", 2),
        ("shard:3", 0),
        ("tmp:10,gpu:a100:2", 2),
    ],
)
def test_gpus_are_read_from_slurms_words(gres: str, gpus: int) -> None:
    assert gpus_in(gres) == gpus


@pytest.mark.parametrize(("batch", "nodes", "ranks"), [(64, 1, 8), (4, 1, 4), (4, 2, 2), (17, 2, 8)])
def test_processes_share_a_batch(config: Any, batch: int, nodes: int, ranks: int) -> None:
    """A larger batch that does not divide is left to the trainer, which refuses it."""
    config.recipe._set_flag("readonly", False)
    config.recipe.global_batch = batch
    assert StageNeeds(Limits(nodes=nodes, ranks=8), False, print).ranks(config) == ranks


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
