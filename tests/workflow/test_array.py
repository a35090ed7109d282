"""The shards of a dataset as one Slurm job array, and what the executor would do wrong with it."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import zlib

import pytest

from tests.workflow.planning import Workflow

SHARDS = [f"data/tokens/demo/puzzles/{shard:03d}.json" for shard in range(5)]


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


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("sinfo") is None, reason="no Slurm here: sinfo is not on the PATH")
@pytest.mark.slow
def test_on_a_real_cluster(workflow: Workflow) -> None:
    workflow.edit("config/workflow.yaml", r"\brecords: \d+", "records: 300")
    workflow.edit("config/workflow.yaml", r"^(  puzzles: .*\bshards: )\d+", r"\g<1>5")
    partition = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=True).stdout.split()[0]
    machine = ["--default-resources", f"slurm_partition={partition}", "slurm_account=root", "runtime=10", "mem_mb=1000"]
    machine += ["--set-resources", *(f"{rule}:mem_mb=1000" for rule in ("raw", "build_tokenizer", "tokenize"))]
    machine += ["tokenize:cpus_per_task=40", "--slurm-init-seconds-before-status-checks", "8", "--retries", "0"]
    machine += ["--max-status-checks-per-second", "10", "--profile", "slurm"]
    done = workflow.call(*SHARDS, *machine, "--jobs", "8")
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "the Slurm executor would lose jobs of its arrays (tokenize)" in text
    text = workflow.output(*SHARDS, *machine)
    assert text.count("Submitted array job") == 1
    assert "individual task IDs are 1-5" in text
    manifests = [json.loads((workflow.folder / shard).read_text()) for shard in SHARDS]
    assert [manifest["shard"] for manifest in manifests] == [0, 1, 2, 3, 4]
