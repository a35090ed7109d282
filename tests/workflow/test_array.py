"""The shards of a dataset as one Slurm job array, and what the executor would do wrong with it."""

import base64
import json
import os
import re
import subprocess
import sys
import zlib

from tests.workflow.planning import Workflow


def test_a_task_of_an_array_becomes_its_own_job_and_leaves_the_first_tasks_files_alone(workflow: Workflow) -> None:
    first = workflow.folder / "data/raw/puzzles/train.jsonl"
    first.parent.mkdir(parents=True)
    first.write_text("made by the first task\n")
    commands = {"2": zlib.compress(b"echo mine > second.txt").hex()}
    sent = base64.b64encode(json.dumps(commands).encode()).decode()
    command = [sys.executable, "-m", "snakemake", "--executor", "slurm-jobstep", "--jobs", "1", "--force", "--mode", "remote"]
    command += ["data/raw/puzzles/manifest.json", "--slurm-jobstep-array-execs", sent]
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
