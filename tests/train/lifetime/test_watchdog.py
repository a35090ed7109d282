"""Jobs that end because a rank of theirs hangs, is gone or fails."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs import PLAIN, Job, MakeJob, deepspeed, finish, kill_rank, ranks_of, start, torchrun

pytestmark = pytest.mark.slow
# A single micro batch in a step: nothing comes after it in which ranks would ask each other.
ONE_MICRO_BATCH = ["recipe.global_batch=2", "recipe.steps=400", "runtime.watchdog_seconds=8"]
LONG = ["recipe.steps=2000"]


def test_a_rank_that_hangs_ends_the_job_with_all_ranks_stacks(make_job: MakeJob) -> None:
    """In the thread that reads for it, while the other waits; a single rank too. In test_attempt_ends.py a save hangs."""
    jobs = [make_job("one", ["recipe.global_batch=1", *ONE_MICRO_BATCH[1:]]), make_job("two", ONE_MICRO_BATCH, torchrun(2))]
    started = [hanging(job, rank, "data") for rank, job in enumerate(jobs)]
    for job, process in zip(jobs, started, strict=True):
        text, code = finish(process)
        assert code != 0
        assert len(re.findall(r"^Timeout \(0:00:0[89]\)!$", text, re.MULTILINE)) == (1 if job.launcher == PLAIN else 2), text
        assert re.search(r'hanging\.py", line \d+ in wrapped', text)  # where it hangs
        assert job.status()["state"] == "running"  # nobody was left to write


def hanging(job: Job, rank: int, place: str) -> subprocess.Popen[str]:
    """A job one rank of which hangs at a place of a later step."""
    job.freeze()
    command = job.command()
    at = command.index("longspec.train")
    return start([*command[:at], "tests.train.lifetime.hanging", str(rank), place, *command[at + 1 :]], job.out)


def test_a_stopped_rank_ends_the_job(make_job: MakeJob) -> None:
    """A process none of whose threads goes on: the other rank, which waits for it, ends, and torchrun kills the stopped one."""
    job = make_job("job", ["runtime.watchdog_seconds=8"], torchrun(2))
    process = job.start()
    job.wait_for(5, process)
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    began = time.monotonic()
    text, code = finish(process)
    assert code != 0
    assert "Timeout (0:00:08)!" in text
    assert time.monotonic() - began < 120  # the collectives' own limit is 30 minutes


def test_a_killed_rank_0_ends_the_job(make_job: MakeJob) -> None:
    """test_attempt_ends.py kills rank 1, under torchrun."""
    job = make_job("job", LONG, deepspeed(2))
    process = job.start()
    job.wait_for(5, process)
    others = ranks_of(process)
    kill_rank(process, 0)
    began = time.monotonic()
    _, code = finish(process)
    assert code != 0
    assert time.monotonic() - began < 60
    assert not Path(f"/proc/{others[1]}").exists()
