"""How the log of a job of two ranks ends: with the job's own words, and without torchrun's call stack and table."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import Job, MakeJob, finish, kill_rank, start

pytestmark = pytest.mark.slow
RAISING = """
import longspec.train.__main__ as program
from longspec.distributed import find_ranks

train_step, rank = program.train_step, find_ranks().rank

def broken(engine, batches, step, *rest):
    if (rank, step) == (1, 2):
        raise ZeroDivisionError("broken on purpose")
    return train_step(engine, batches, step, *rest)

program.train_step = broken
program.main()
"""


def launch(job: Job, *module: str) -> "subprocess.Popen[str]":
    """As the rule starts a stage on a machine with two GPUs."""
    options = job.command()[len(job.launcher) + 2 :]
    launcher = [sys.executable, "-m", "longspec.cluster", "launch", "--ranks=2", f"--log={job.out / 'train.log'}"]
    job.freeze()
    return start([*launcher, "--", *(module or ["longspec.train"]), *options], job.out)


def ended(job: Job, process: "subprocess.Popen[str]") -> str:
    """The whole log of a job that must not end well."""
    finish(process)
    assert process.returncode == 1
    text = (job.out / "train.log").read_text()
    assert not re.search(r"ChildFailedError|SignalException|Root Cause|torch/distributed/run\.py", text), text
    return text.rstrip()


def test_a_refused_jobs_log_ends_with_the_refusal(make_job: MakeJob) -> None:
    job = make_job("job", ["recipe.data.collation=longcot"])
    text = ended(job, launch(job))
    assert "Traceback" not in text
    refusal = r"rank [01] on \S+: error: .*collation: packed with base, recipe\.data\.collation is longcot.*"
    assert re.fullmatch(refusal, text.splitlines()[-1])


def test_a_stopped_jobs_log_ends_with_its_step_and_reason(make_job: MakeJob) -> None:
    job = make_job("job", ["recipe.steps=400"])
    process = launch(job)
    job.wait_for(2, process)
    process.send_signal(signal.SIGTERM)
    text = ended(job, process)
    assert "Traceback" not in text
    assert text.splitlines()[-1] == f"stopped at step {job.status()['step']} of 400: signal SIGTERM"


def test_a_crashed_jobs_log_ends_with_the_crashed_ranks_traceback(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    job = make_job("job")
    text = ended(job, launch(job, "raising"))
    end = text[text.index("This attempt ended:") :].splitlines()
    assert re.match(r"rank 1 on \S+: Traceback \(most recent call last\):", end[1])
    assert end[-1] == "ZeroDivisionError: broken on purpose"
    assert "raising.py" in "".join(end)
    assert (job.status()["state"], job.status()["deterministic"]) == ("failed", False)


def test_a_killed_ranks_job_names_it_in_the_last_line(make_job: MakeJob) -> None:
    job = make_job("job", ["recipe.steps=2000"])
    process = launch(job)
    job.wait_for(2, process)
    pid = kill_rank(process, 1)
    text = ended(job, process)
    assert re.fullmatch(rf"error: rank 1 on \S+ \(pid {pid}\) was killed by SIGKILL", text.splitlines()[-1])
    assert job.status()["state"] == "failed"
    assert job.status()["step"] >= 2


def test_a_hung_ranks_job_shows_its_stacks_and_names_those_that_left_no_word(make_job: MakeJob) -> None:
    """One that waits for the hung one ends like it."""
    job = make_job("job", ["recipe.global_batch=2", "recipe.steps=400", "runtime.watchdog_seconds=8"])
    _, code = finish(launch(job, "tests.train.lifetime.hanging", "1", "write"))
    assert code == 1
    text = (job.out / "train.log").read_text().rstrip()
    assert re.search(r'hanging\.py", line \d+ in wrapped', text)
    named = [re.match(r"error: rank (\d) on \S+ \(pid \d+\) ended without a word", line) for line in text.splitlines()[-2:]]
    assert [found and found[1] for found in named] == ["0", "1"]
