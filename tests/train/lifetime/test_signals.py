"""Signals end a training job well in every moment of it, and nothing of a job outlives its launcher."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from longspec.train.preemption import SAME_REQUEST
from tests.jobs import MakeJob, children_of, deepspeed, family, finish, ranks_of, torchrun
from tests.slurm.cluster import is_running

pytestmark = pytest.mark.slow
LONG = ["recipe.steps=2000"]


# Signals that wait for the process are delivered together: Linux then runs the handlers of the later ones first.
PROGRAM = """
import itertools, os, signal, time
from longspec.train.preemption import Stop
for numbers in itertools.permutations([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]):
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # before the thread that takes them is born, which inherits it
    stop = Stop(60)
    for number in numbers:
        os.kill(os.getpid(), number)
    assert not stop.agreed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    deadline = time.monotonic() + 10
    while not (stop.agreed() and stop.reason == "signal SIGINT") and time.monotonic() < deadline:
        time.sleep(0.01)
    print(stop.reason)
"""


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


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> dict[int, int]:
    """The ranks as soon as they are there: in the midst of their start."""
    deadline = time.monotonic() + 120
    while len(ranks := ranks_of(process)) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, finish(process)[0]
        time.sleep(0.01)
    return ranks


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


def test_a_stopped_rank_ends_the_job(make_job: MakeJob) -> None:
    """A process none of whose threads goes on: the other rank, which waits for it, ends; torchrun takes 30 s to kill it."""
    job = make_job("job", [*LONG, "runtime.watchdog_seconds=8"], torchrun(2))
    process = job.start()
    job.wait_for(5, process)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    gone = all_gone([ranks[0]], 60)  # the collectives' own limit is 30 minutes
    os.kill(ranks[1], signal.SIGKILL)
    text, code = finish(process)
    assert gone
    assert code != 0
    assert "Timeout (0:00:08)!" in text


@pytest.mark.parametrize(("number", "moment"), [(signal.SIGTERM, "start"), (signal.SIGKILL, "steps")])
def test_nothing_outlives_the_launcher(make_job: MakeJob, number: signal.Signals, moment: str) -> None:
    job = make_job("job", LONG, torchrun(2))
    process = job.start()
    wait_for_ranks(process, 2)
    if moment == "steps":
        job.wait_for(5, process)
    pids = list(family(process.pid))
    process.send_signal(number)
    left = all_gone(pids, 60)
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)
    assert left
    finish(process)


def test_what_a_person_asked_for_is_told_before_what_launchers_made_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["signal SIGINT"] * 6
