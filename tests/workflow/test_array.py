"""The shards of a dataset as one Slurm job array, and what the executor would do wrong with it."""

import base64
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable

import pytest

from longspec.workflow.jobs.arrays import check_arrays, own_command
from tests.workflow.planning import Workflow

OPTION = "--slurm-jobstep-array-execs"
WRITTEN = pytest.mark.parametrize(
    "written", [lambda sent: [f"{OPTION}={sent}"], lambda sent: [OPTION, sent]], ids=["wrapped", "script"]
)


@WRITTEN
def test_a_task_of_an_array_becomes_its_own_job_and_leaves_the_first_tasks_files_alone(
    workflow: Workflow, written: Callable[[str], list[str]]
) -> None:
    first = workflow.folder / "data/raw/puzzles/train.jsonl"
    first.parent.mkdir(parents=True)
    first.write_text("made by the first task\n")
    commands = {"2": zlib.compress(b"echo mine > second.txt").hex()}
    sent = base64.b64encode(json.dumps(commands).encode()).decode()
    command = [sys.executable, "-m", "snakemake", "--executor", "slurm-jobstep", "--jobs", "1", "--force", "--mode", "remote"]
    command += ["data/raw/puzzles/manifest.json", *written(sent)]
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MIN": "1", "PYTHONPATH": str(workflow.folder / "src")}
    done = subprocess.run(command, cwd=workflow.folder, env=os.environ | task, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (workflow.folder / "second.txt").read_text() == "mine\n"
    assert first.read_text() == "made by the first task\n"


def test_the_profile_hands_a_whole_array_over_at_once(workflow: Workflow) -> None:
    """Else the executor forgets the rest of it."""
    workflow.edit("config/workflow.yaml", r"^(  puzzles: .*\bshards: )\d+", r"\g<1>300")
    jobs = [job for job in workflow.plan("--profile", "slurm").values() if job["rule"] == "tokenize"]
    assert len(jobs) > 300
    profile = (workflow.folder / "profiles/slurm/profile.yaml").read_text()
    for key in ("jobs", "max-jobs-per-timespan"):
        found = re.search(rf"^{key}: (\d+)", profile, re.MULTILINE)
        assert found
        assert int(found[1]) >= 1000


@WRITTEN
def test_only_a_later_task_of_an_array_has_a_command_of_its_own(written: Callable[[str], list[str]]) -> None:
    sent = base64.b64encode(json.dumps({"2": zlib.compress(b"echo mine").hex()}).encode()).decode()
    arguments = ["snakemake", *written(sent), "--jobs=1"]
    assert own_command(arguments, {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MIN": "1"}) == "echo mine"
    assert own_command(arguments, {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "1"}) is None
    assert own_command(arguments, {}) is None
    assert own_command(["snakemake"], {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MIN": "1"}) is None


def test_an_array_that_would_not_be_handed_over_at_once_is_refused() -> None:
    planned = ["tokenize"] * 3 + ["raw"]
    check_arrays("tokenize", planned, 4, 4)
    check_arrays("none", planned, 1, 1)
    check_arrays(None, planned, 1, 1)
    check_arrays("pack", planned, 1, 1)
    for setting, jobs, timespan in (("tokenize", 3, 9), ("all", 9, 3), ("pack; tokenize", 1, 1)):
        with pytest.raises(ValueError, match=rf"^4 jobs are planned, but --jobs is {jobs} and .* {timespan}/.*raise both to 4"):
            check_arrays(setting, planned, jobs, timespan)
