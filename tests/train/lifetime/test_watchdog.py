"""Jobs of several ranks that end because one of them hangs, is gone or fails: status.json names it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from longspec.distributed import Ranks
from longspec.train.lifetime.watchdog import Watchdog
from tests.jobs import Job, MakeJob, deepspeed, finish, ranks_of, start, torchrun

pytestmark = pytest.mark.slow
# A single micro batch in a step: nothing comes after it in which ranks would ask each other.
ONE_MICRO_BATCH = ["recipe.global_batch=2", "recipe.steps=400", "runtime.watchdog_seconds=8"]


def named(rank: int, pid: int) -> str:
    return f"rank {rank} ({os.uname().nodename}, pid {pid})"


@pytest.mark.parametrize(
    "hangs",
    [
        # Phases of a step are told apart in one way: data's is the example. Two jobs wait beside each other.
        [(1, "data", "data"), (1, "write", "checkpoint, after prepare")],
        pytest.param([(1, "forward", "draft"), (0, "backward", "draft"), (0, "metrics", "other")], marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_is_named(make_job: MakeJob, hangs: list[tuple[int, str, str]]) -> None:
    """In its main thread, or in that which reads for it, while all others go on."""
    started = [hanging(make_job(place, ONE_MICRO_BATCH, torchrun(2)), rank, place) for rank, place, _ in hangs]
    for (rank, _, where), (job, process, pid) in zip(hangs, started, strict=True):
        text, code = finish(process)
        assert code != 0
        found = job.status()
        assert (found["state"], found["deterministic"]) == ("failed", False)
        reason = f"no progress for 8 s (runtime.watchdog_seconds): {named(rank, pid)} in {where}, for which the others wait"
        assert found["reason"] == reason
        assert f"error: {reason}" in text
        assert re.search(r'hanging\.py", line \d+ in wrapped', text)  # where it hangs


def hanging(job: Job, rank: int, place: str) -> tuple[Job, subprocess.Popen[str], int]:
    """A job that has done four steps, one rank of which hangs at a place of a later one; that rank's process id."""
    job.freeze()
    command = job.command()
    at = command.index("longspec.train")
    process = start([*command[:at], "tests.train.lifetime.hanging", str(rank), place, *command[at + 1 :]], job.out)
    job.wait_for(4, process)
    return job, process, ranks_of(process)[rank]


def test_a_stopped_rank_is_named(make_job: MakeJob) -> None:
    """A process none of whose threads goes on."""
    job = make_job("job", ["runtime.watchdog_seconds=8"], torchrun(2))
    process = job.start()
    job.wait_for(5, process)
    hung = ranks_of(process)[1]
    os.kill(hung, signal.SIGSTOP)
    began = time.monotonic()
    job.wait_until(lambda: job.status()["state"] == "failed", process)
    assert time.monotonic() - began < 120  # the collectives' own limit is 30 minutes
    os.kill(hung, signal.SIGKILL)  # as torchrun does 30 s after it has asked it to end
    assert finish(process)[1] != 0
    found = job.status()
    assert "no progress for 8 s" in found["reason"]
    assert named(1, hung) in found["reason"]
    assert "rank 0" not in found["reason"]


def test_of_ranks_that_came_equally_far_the_silent_one_is_named() -> None:
    """Driven by hand: both wait in the same question, and the beats of one of them end."""
    for silent, culprits in ((True, [1]), (False, [0, 1])):
        store = HashStore()
        first, second = (Watchdog(store, Ranks(rank, rank, 2), 4, lambda reason: None) for rank in (0, 1))
        for watchdog in (first, second):
            watchdog.passed("the question whether to stop")
            watchdog._beat()
        first._look()
        for _ in range(5):
            assert first._hung() is None
            for watchdog in (first,) if silent else (first, second):
                watchdog._beat()
            first._look()
        cause = first._hung()
        assert cause is not None
        assert cause.culprits == culprits
        assert ("for which the others wait" in cause.reason) is silent


@pytest.mark.parametrize(("state", "limit"), [("troubled", 10), ("asked", 20), ("well", 180)])
def test_how_long_a_silent_rank_is_waited_for(state: str, limit: int) -> None:
    """Driven by hand: after an error, when asked to stop, and when nothing says that something is wrong."""
    store = HashStore()
    first, _ = (Watchdog(store, Ranks(rank, rank, 2), 4, lambda reason: None, lambda: state == "asked") for rank in (0, 1))
    if state == "troubled":
        first._troubled.set()
    first._look()
    for _ in range(limit):
        assert first._gone() is None
        first._beat()
        first._look()
    first._beat()
    first._look()
    cause = first._gone()
    assert cause is not None
    assert cause.culprits == [1]
    assert cause.reason.startswith(f"no sign of life for {limit} s: rank 1 (")


def test_a_killed_rank_0_is_named_by_one_that_lives(make_job: MakeJob) -> None:
    """test_attempt_ends.py kills rank 1."""
    job = make_job("job", ["recipe.steps=2000"], torchrun(2))
    process = job.start()
    job.wait_for(5, process)
    pid = ranks_of(process)[0]
    os.kill(pid, signal.SIGKILL)
    text, code = finish(process)
    assert code != 0
    found = job.status()
    assert found["state"] == "failed", text[-3000:]
    assert found["reason"].startswith(f"no sign of life for 10 s: {named(0, pid)} in ")
    assert found["step"] >= 5


def test_rank_0_is_named_though_the_ranks_store_dies_with_it(make_job: MakeJob) -> None:
    """Under the deepspeed launcher."""
    job = make_job("job", ["recipe.steps=2000"], deepspeed(2))
    process = job.start()
    job.wait_for(5, process)
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    _, code = finish(process)
    assert code != 0
    assert job.status()["state"] == "failed"
    assert job.status()["reason"].startswith("rank 0 is gone")


def test_an_error_of_one_rank_is_told_by_rank_0(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("job", launcher=torchrun(2))
    process = failing(job, tmp_path)
    _, code = finish(process)
    assert code != 0
    assert job.status()["state"] == "failed"
    assert "rank 1 (" in job.status()["reason"]
    assert "): KeyError: 'of rank 1 alone'" in job.status()["reason"]


def failing(job: Job, folder: Path) -> subprocess.Popen[str]:
    """A job whose rank 1 fails in its third step."""
    program = folder / "program.py"
    program.write_text(
        "from longspec.train import __main__ as trainer\n"
        "from longspec.distributed import find_ranks\n"
        "load = trainer.StepBatches.load\n"
        "def failing(self, step, *arguments):\n"
        "    if step == 2 and find_ranks().rank == 1:\n"
        "        raise KeyError('of rank 1 alone')\n"
        "    return load(self, step, *arguments)\n"
        "trainer.StepBatches.load = failing\n"
        "trainer.main()\n"
    )
    job.freeze()
    command = job.command()
    at = command.index("-m", len(job.launcher))
    assert command[0] == sys.executable
    return start([*command[:at], str(program), *command[at + 2 :]], job.out)
