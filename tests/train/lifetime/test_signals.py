"""Signals end a training job well in every moment of it; tests/cluster/test_launch.py has a launcher that is killed."""

import os
import signal
import time
from contextlib import suppress

import pytest

from longspec.train.preemption import SAME_REQUEST
from tests.jobs import MakeJob, children_of, deepspeed, finish, ranks_of, torchrun
from tests.slurm.cluster import is_running

pytestmark = pytest.mark.slow
LONG = ["recipe.steps=2000"]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


def all_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive(pids)


def tell(pids: list[int], number: signal.Signals) -> None:
    """Send them a signal, as many as are still there: the first may take the others along."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def test_ctrl_c_under_the_deepspeed_command_saves_a_step(make_job: MakeJob) -> None:
    """It ends the command at once, and launch.py tells the ranks once more."""
    job = make_job("job", LONG, deepspeed(2))
    process = job.start()
    job.wait_for(5, process)
    # A terminal tells all at the same moment; here the ranks come first, or the command might send them a SIGTERM before.
    tell([*ranks_of(process).values(), process.pid], signal.SIGINT)
    tell(children_of(process.pid), signal.SIGINT)
    text, _ = finish(process)
    assert (job.status()["state"], job.status()["reason"]) == ("stopped", "signal SIGINT")
    assert f"saved step {job.status()['step']}," in text


def test_a_second_signal_ends_a_rank_inside_a_collective(make_job: MakeJob) -> None:
    job = make_job("job", LONG, torchrun(2))
    process = job.start()
    job.wait_for(5, process)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)  # rank 0 waits for it in a collective
    time.sleep(1)
    os.kill(ranks[0], signal.SIGTERM)
    time.sleep(1)
    os.kill(ranks[0], signal.SIGTERM)
    time.sleep(SAME_REQUEST)
    assert alive([ranks[0]])
    os.kill(ranks[0], signal.SIGTERM)
    assert all_gone([ranks[0]], 20)  # the collectives' own limit is 30 minutes
    os.kill(ranks[1], signal.SIGKILL)
    _, code = finish(process)
    assert code != 0
    assert job.status()["state"] == "running"
