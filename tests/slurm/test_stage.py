"""One stage on a real Slurm: disturbed in every way a cluster knows, on several nodes, without hope, without controller."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.slurm.cluster import NODES, Cluster, until
from tests.slurm.submitted import STAGE, TARGET_RULE, Submitted, equal, state_of
from tests.workflow.calls import read

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def process_of(cluster: Cluster, rank: int) -> int:
    """A rank's process, of the only job."""
    ranks = (pid for node in NODES for pid in cluster.processes_on(node) if f"\0RANK={rank}\0" in read(pid, "environ"))
    return next(pid for pid in ranks if "longspec.train" in read(pid, "cmdline"))


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

    submitted.wait_for(1, 5, process)
    os.kill(process_of(cluster, 1), signal.SIGKILL)
    submitted.wait_for(2, 5, process)
    subprocess.run(["scancel", submitted.job(2)], check=True)
    submitted.wait_for(3, 5, process)
    urgent = ["sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--time=1", "--output=/dev/null", "--wrap", "sleep 1"]
    subprocess.run(urgent, check=True)
    submitted.wait_for(4, 5, process)
    node = node_of(submitted.job(4))
    cluster.power_off(node)
    submitted.wait_for(5, 1, process)  # behind the wait for a sign of life from the fourth
    submitted.pace(3)  # it has a minute from its start, and Slurm looks every half
    subprocess.run(["scontrol", "update", f"jobid={submitted.job(5)}", "timelimit=1"], check=True)
    cluster.power_on(node)
    submitted.wait_until(lambda: len(submitted.attempts()) == 6, process)
    submitted.pace(0)
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
    """Jobs of few minutes; the margin leaves room for a start, before which Snakemake starts twice, and for ten seconds."""
    needed = 10 + 3 * undisturbed.start_seconds()
    minutes = math.ceil((needed + 6) / 60)
    margin = round(60 * minutes - needed)
    submitted.edit("config/run/demo.yaml:base", r"stop_margin_seconds: \d+", f"stop_margin_seconds: {margin}")
    submitted.set("runtime", minutes)
    submitted.pace(4)  # the stage is longer than any of its jobs
    process = submitted.start()
    submitted.wait_until(lambda: len(submitted.attempts()) == 2, process)
    submitted.pace(0)
    submitted.finish(process)
    attempts = submitted.attempts()
    assert len(attempts) >= 2
    for path in attempts[:-1]:
        last = path.read_text().rstrip().splitlines()[-1]
        assert re.fullmatch(r"stopped at step \d+ of 60: deadline", last)
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


def test_two_nodes_of_two_ranks_learn_as_one_does_and_are_checked_beforehand(
    submitted: Submitted, undisturbed: Submitted, cluster: Cluster
) -> None:
    """Told to end as above: one command on one node and on two, and with a scheduler that is away, which is waited for."""
    submitted.set("nodes", 2)
    for stage in ("long", "longcot"):  # whose two rows no four ranks could share
        submitted.edit(f"config/run/demo.yaml:{stage}", r"global_batch: 2", "global_batch: 4")
    process = submitted.start("preflight", TARGET_RULE)
    tell_the_shell_alone(submitted, process)
    submitted.pace(2)
    cluster.stop_controller()
    time.sleep(10)
    cluster.start_controller()
    submitted.pace(0)
    submitted.finish(process)
    assert len(submitted.attempts()) == 2
    assert all("4 processes x " in path.read_text() for path in submitted.attempts())
    assert json.loads((submitted.folder / TARGET_RULE).read_text())["world_size"] == 4
    steps, losses = zip(*submitted.curve(), strict=True)
    expected_steps, expected = zip(*undisturbed.curve(), strict=True)
    assert steps == expected_steps
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert ", 0 failed" in (submitted.folder / "logs/preflight/demo.log").read_text()
    report = (submitted.folder / "results/demo/preflight.json").read_text()
    assert "n1" in report
    assert "n2" in report


def test_a_batch_that_the_profiles_processes_cannot_share_costs_no_job(submitted: Submitted) -> None:
    submitted.edit("config/run/demo.yaml:base", r"global_batch: \d+", "global_batch: 33")
    text = submitted.finish(submitted.start(), code=1)
    last = text.rstrip().splitlines()[-1]
    assert f"{STAGE.removeprefix('results/')}: recipe.global_batch: 33 " in last
    assert "has been submitted" not in text
    assert not submitted.attempts()


def test_a_stage_without_hope_costs_one_job_and_tells_why(submitted: Submitted) -> None:
    rows = submitted.folder / "data/packed/demo/puzzles-base-128-split/rows.arrow"
    os.truncate(rows, rows.stat().st_size - 1)
    text = submitted.finish(submitted.start(), code=1)
    assert len(submitted.attempts()) == 1
    assert text.count("has been submitted with SLURM jobid") == 1
    log = submitted.attempts()[0].read_text()
    last = log.rstrip().splitlines()[-1]
    assert last.startswith("error: ")
    assert rows.name in last
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
    submitted.pace(3)
    refused_beside(submitted, second)
    process = submitted.popen(resume())
    submitted.wait_until(lambda: running(second) in submitted.output_so_far(), process)
    submitted.pace(0)
    text = submitted.finish(process)
    for job in (orphan, second):
        assert running(job) in text
    trained = [path for path in submitted.attempts() if " tokens/s\n" in path.read_text()]
    assert len(trained) == 2
    assert state_of(orphan) == "CANCELLED"
    assert state_of(second) == "COMPLETED"
    assert submitted.curve() == undisturbed.curve()
    assert equal(submitted.weights(), undisturbed.weights())


def running(job: str) -> str:
    return f"{job} train_wildcards_demo_sinkpi-slicing_base running"


def resume(*options: str) -> list[str]:
    """The command, without arguments for Snakemake: it has those of the killed one."""
    return [sys.executable, "-m", "longspec.cluster", "resume", "--poll", "2", *options]


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
