"""One stage on a real Slurm: disturbed in every way a cluster knows, on several nodes, without hope, without controller."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.slurm.cluster import Cluster, until
from tests.slurm.submitted import CLUSTER, STAGE, TARGET_RULE, Submitted, equal, state_of

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def ranks_on(cluster: Cluster, submitted: Submitted) -> dict[int, int]:
    """The processes of the copy's ranks, by rank."""
    found = {}
    for node in ("n1", "n2"):
        for pid in cluster.processes_on(node):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
                here = Path(f"/proc/{pid}/cwd").readlink() == submitted.folder
            except OSError:
                continue
            rank = [entry.removeprefix("RANK=") for entry in environment if entry.startswith("RANK=")]
            if here and rank and words[1:3] != ["-m", "torch.distributed.run"] and "longspec.train" in words:
                found[int(rank[0])] = pid
    return found


def node_of(job: str) -> str:
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%N"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def stopped_at(log: str) -> int:
    """The step that was saved when the job was told to end."""
    found = re.search(r"stopped at step (\d+) of \d+: signal SIGTERM", log)
    assert found, log[-2000:]
    return int(found[1])


def test_whatever_happens_to_a_job_the_stage_ends_as_if_nothing_had(
    submitted: Submitted, undisturbed: Submitted, cluster: Cluster
) -> None:
    """A rank killed, scancel, preemption, a node without power, the time limit."""
    process = submitted.start()

    submitted.wait_for(1, 6, process)
    os.kill(ranks_on(cluster, submitted)[1], signal.SIGKILL)
    submitted.wait_for(2, 6, process)
    subprocess.run(["scancel", submitted.job(2)], check=True)
    submitted.wait_for(3, 6, process)
    urgent = ["sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--time=1", "--output=/dev/null", "--wrap", "sleep 1"]
    subprocess.run(urgent, check=True)
    submitted.wait_for(4, 6, process)
    node = node_of(submitted.job(4))
    cluster.power_off(node)
    submitted.wait_for(5, 1, process)
    cluster.power_on(node)
    # It has waited for a sign of life from the fourth for longer than the minute that it may now have had.
    subprocess.run(["scontrol", "update", f"jobid={submitted.job(5)}", "timelimit=1"], check=True)
    submitted.finish(process)

    assert len(submitted.attempts()) == 6
    states = [state_of(submitted.job(attempt)) for attempt in range(1, 7)]
    assert states == ["FAILED", "CANCELLED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "COMPLETED"]
    logs = [path.read_text().rstrip() for path in submitted.attempts()]
    assert re.search(r"rank +: 1 .*?exitcode +: -9 ", logs[0], re.DOTALL)
    for attempt in (1, 2):  # told before they are killed
        assert f"starting at step {stopped_at(logs[attempt])}\n" in logs[attempt + 1]
    assert submitted.curve() == undisturbed.curve()
    assert equal(submitted.weights(), undisturbed.weights())


def test_a_stage_longer_than_its_jobs_is_trained_in_slices(
    submitted: Submitted, undisturbed: Submitted, cluster: Cluster
) -> None:
    """Jobs of one minute or of two; the margin is set so that a start and two fifths of the stage fit."""
    needed = 1.3 * undisturbed.start_seconds() + 0.4 * sum(row["seconds"] for row in undisturbed.rows())
    minutes = math.ceil((needed + 6) / 60)
    margin = round(60 * minutes - needed)
    submitted.edit("config/run/demo.yaml:base", r"stop_margin_seconds: \d+", f"stop_margin_seconds: {margin}")
    submitted.set("runtime", minutes)
    submitted.finish(submitted.start())
    attempts = submitted.attempts()
    assert len(attempts) >= 2
    for path in attempts[:-1]:
        last = path.read_text().rstrip().splitlines()[-1]
        assert re.fullmatch(r"stopped at step \d+ of 120: deadline", last)
    assert submitted.curve() == undisturbed.curve()
    assert equal(submitted.weights(), undisturbed.weights())


def tell_the_shell_alone(submitted: Submitted, process: "subprocess.Popen[str]") -> None:
    """As where control groups tell a job's processes apart: with the shell the batch step ends, the ranks save and then end."""
    submitted.wait_for(1, 4, process)
    subprocess.run(["scancel", "--batch", "--signal=TERM", submitted.job(1)], check=True)
    submitted.wait_for(2, 1, process)
    first, second = (path.read_text() for path in submitted.attempts()[:2])
    assert f"starting at step {stopped_at(first)}\n" in second
    assert "taken over" not in second, "the first has given the folder back"


def test_two_nodes_of_two_ranks_learn_as_one_process_does(prepared: Submitted, submitted: Submitted, cluster: Cluster) -> None:
    """Told to end as above, which is one command on one node and on two, and with a scheduler that is away for a while, which
    is waited for.
    """
    alone = prepared.copy(submitted.folder.parent / "alone")
    for copy in (alone, submitted):
        copy.edit("config/run/demo.yaml:base", r"steps: \d+", "steps: 20")
    submitted.set("nodes", 2)
    process = submitted.start()
    tell_the_shell_alone(submitted, process)
    cluster.stop_controller()
    time.sleep(15)
    cluster.start_controller()
    submitted.finish(process)
    alone.train_locally("--set-resources", "train:ranks=1")
    assert len(submitted.attempts()) == 2
    assert all("4 processes x " in path.read_text() for path in submitted.attempts())
    manifest = json.loads((submitted.folder / TARGET_RULE).read_text())
    assert manifest["world_size"] == 4
    steps, losses = zip(*submitted.curve(), strict=True)
    _, expected = zip(*alone.curve(), strict=True)
    assert steps == tuple(range(1, 21))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_stage_without_hope_costs_one_job_and_tells_why(submitted: Submitted) -> None:
    submitted.edit("config/run/demo.yaml:base", r"global_batch: \d+", "global_batch: 33")
    text = submitted.finish(submitted.start(), code=1)
    assert len(submitted.attempts()) == 1
    assert text.count("has been submitted with SLURM jobid") == 1
    log = submitted.attempts()[0].read_text()
    last = log.rstrip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "33" in last
    assert re.search(r"rank +: \d \(local_rank", log), "torchrun's table"
    assert last in text, "Snakemake shows it"


def test_the_controller_is_killed_and_one_command_goes_on(
    submitted: Submitted, undisturbed: Submitted, cluster: Cluster
) -> None:
    """Killed twice: at first its job is cancelled, then it is waited for."""
    process = submitted.start()
    orphan = kill_in_its_job(submitted, 1, process)
    process = submitted.popen(resume("--cancel"))
    second = kill_in_its_job(submitted, 2, process)
    refused_beside(submitted, second)
    text = submitted.finish(submitted.popen(resume()))
    for job in (orphan, second):
        assert f"{job} train_wildcards_demo_sinkpi-slicing_base running" in text
    trained = [path for path in submitted.attempts() if " tokens/s\n" in path.read_text()]
    assert len(trained) == 2
    assert state_of(orphan) == "CANCELLED"
    assert state_of(second) == "COMPLETED"
    assert submitted.curve() == undisturbed.curve()
    assert equal(submitted.weights(), undisturbed.weights())


def resume(*options: str) -> list[str]:
    return [sys.executable, "-m", "longspec.cluster", "resume", "--poll", "2", *options, "--", *CLUSTER, TARGET_RULE]


def kill_in_its_job(submitted: Submitted, attempt: int, process: "subprocess.Popen[str]") -> str:
    """Kill the controlling process while its job trains; the job, which goes on."""
    submitted.wait_for(attempt, 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    job = submitted.job(attempt)
    assert state_of(job) == "RUNNING"
    return job


def refused_beside(submitted: Submitted, job: str) -> None:
    """A second job for the same stage, on the other node, while the first one trains."""
    before = submitted.rows()[-1]["step"]
    other = {"n1": "n2", "n2": "n1"}[node_of(job)]
    command = submitted.attempts()[0].read_text().splitlines()[0].partition(" -m longspec.train ")[2]
    second = f"{sys.executable} -m longspec.cluster launch --ranks 2 -- longspec.train {command}"
    srun = ["srun", "--partition=cpu", f"--nodelist={other}", "--mem=2000", "--time=5", "bash", "-c", second]
    done = subprocess.run(srun, cwd=submitted.folder, env=submitted.environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert job in done.stdout + done.stderr, "the job that holds the folder is named"
    assert "another job" in done.stdout + done.stderr
    until(lambda: submitted.rows()[-1]["step"] > before, 60, "the first goes on")
    assert json.loads((submitted.folder / STAGE / "status.json").read_text())["state"] == "running"
