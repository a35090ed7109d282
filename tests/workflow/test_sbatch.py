"""What Slurm is asked for, word by word: stand-ins for its commands write down what they are told and fail the job."""

import json
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from tests.workflow.planning import Workflow

pytestmark = pytest.mark.slow  # half a minute and more as a whole

STAGE = "results/demo/sinkpi-slicing/base"
SHORT = ["--max-status-checks-per-second", "10", "--latency-wait", "1"]
COMMANDS = {
    # A job begins an attempt, with a log of its own.
    "sbatch": 'printf "%s\\n" "$*" >> {told}; mkdir -p {logs}; touch {logs}/attempt-$(grep -c . {told}).log; echo 77',
    "squeue": 'echo "77|${{STATE:-FAILED}}"',
    "scontrol": 'echo "MinJobAge = 300 sec"',
    "sacct": "echo sacct >> {told}; exit 1",
    "sacctmgr": "true",
    "sshare": "true",
    "scancel": "true",
    "sinfo": "true",
}


@pytest.fixture
def slurm(built: Workflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-ins, in a workflow whose stage 1 is to be trained; what they were told."""
    commands, told = tmp_path / "commands", tmp_path / "told.txt"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{text.format(told=told, logs='logs/train/demo/sinkpi-slicing/base')}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    built.edit("config/run/demo.yaml:base", "global_batch: 16", "global_batch: 64")
    (built.folder / f"{STAGE}/checkpoint.json").unlink()
    return told


def asked(told: Path) -> list[str]:
    """The words of the one job that was sent."""
    lines = [line for line in told.read_text().splitlines() if line.startswith("--parsable")]
    assert len(lines) == 1
    return shlex.split(lines[0])


def send(built: Workflow, *more: str) -> str:
    done = built.call("--profile", "slurm", f"{STAGE}/checkpoint.json", "--retries", "0", *SHORT, *more)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_stage_on_a_node_of_eight_gpus(slurm: Path, built: Workflow) -> None:
    assert "--profile COPY" in send(built, "--set-resources", "dequantize_target:mem_mb=320000")
    assert "profiles/default" in send(built, "--workflow-profile", "none")
    text = send(built)
    words = asked(slurm)
    wanted = ["--nodes=1", "--gres=gpu:8", "--ntasks-per-node=8", "--cpus-per-task=8", "--no-requeue"]
    assert set(wanted) <= set(words)
    pairs = dict(pairwise(words))
    assert (pairs["-p"], pairs["-A"], pairs["--mem"], pairs["-t"]) == ("gpu", "default", "900000", "240")
    assert not [word for word in words if re.match(r"--ntasks(=|-per-gpu)", word)], "Slurm refuses tasks beside GPUs"
    assert "sacct" not in slurm.read_text().splitlines(), "whose answers the executor takes wrongly"
    command = re.search(r"Shell command: exec (.*)", text)
    assert command[1].startswith(
        "python -m longspec.cluster launch --nodes 1 --ranks 8 --tasks 8 --cpus 8 --gres=gpu:8"
        " --log logs/train/demo/sinkpi-slicing/base.log -- longspec.train "
    )


def test_an_evaluation_on_two_ranks_asks_for_two_gpus(slurm: Path, built: Workflow) -> None:
    """As the profile says by hand: on the command line that would take the place of all else that it says (docs/slurm.md)."""
    evaluated = "results/demo/sinkpi-slicing/evaluation/lookup.jsonl"
    (built.folder / evaluated).unlink()
    (built.folder / f"{STAGE}/checkpoint.json").touch()
    built.edit("profiles/slurm/profile.yaml", r"(  evaluate:\n.*\n)    gres: .*$", "\\1    gres: \"'gpu:2'\"\n    ranks: 2")
    command = [evaluated, "--profile", "slurm", "--retries", "0", "--rerun-triggers", "input", *SHORT]
    done = built.call(*command)
    words = asked(slurm)
    assert {"--gres=gpu:2", "--cpus-per-task=8"} <= set(words)
    assert dict(pairwise(words))["-p"] == "gpu"
    assert (
        "longspec.cluster launch --plain --ranks 2 --cpus 8 --gres=gpu:2 -- longspec.measure evaluate "
        in done.stdout + done.stderr
    )


def test_a_preempted_stage_is_tried_again_and_a_hopeless_one_is_not(
    slurm: Path, built: Workflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor alone would wait for a preempted job for ever, and this test with it."""
    monkeypatch.setenv("STATE", "PREEMPTED")
    built.edit("src/longspec/workflow/jobs/retries.py", r"^PAUSE = \d+", "PAUSE = 0")
    status = built.folder / STAGE / "status.json"
    status.write_text(json.dumps({"state": "failed", "deterministic": True, "reason": "no such key"}))
    os.utime(status, (1, 1))  # said before this Snakemake began: it may have been mended since
    sbatch = Path(os.environ["PATH"].split(os.pathsep)[0]) / "sbatch"
    sbatch.write_text(f"{sbatch.read_text()}[ $(grep -c . {slurm}) -lt 2 ] || touch {status}\n")
    text = built.call("--profile", "slurm", f"{STAGE}/checkpoint.json", "--retries", "5", *SHORT).stderr
    assert slurm.read_text().count("--parsable") == 2
    assert f"{STAGE} is not tried again: it would fail in the same way again: no such key" in text
