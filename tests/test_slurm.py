"""The one place that asks squeue, and who needs its answer; the stand-in prints what a real one prints for its format."""

import os
from pathlib import Path

import pytest

from longspec import slurm
from longspec.cluster.launch import nodes_of
from longspec.slurm import FIELD, FORMAT, RECORD, NoAnswerError, my_jobs
from tests.cluster.queue import Queue, queued
from tests.refusals import refused


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A squeue and a scontrol of our own; nobody waits between two tries."""
    stand_in = Queue(tmp_path / "bin")
    scontrol = tmp_path / "bin/scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", stand_in.path())
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    return stand_in


def test_the_nodes_of_a_job_also_after_a_moment_without_an_answer(queue: Queue, tmp_path: Path) -> None:
    queue.runs(f"[ -e {tmp_path}/there ] && exec echo 'n[1-2]'\ntouch {tmp_path}/there\necho down >&2; exit 1")
    assert nodes_of("4711") == ["n1", "n2"]
    assert queue.asked() == 2 * ["--noheader --jobs 4711 --format %N"]


def test_a_scheduler_that_stays_away_is_an_error_after_four_tries(queue: Queue) -> None:
    queue.fails("slurm_load_jobs error: Unable to contact slurm controller")
    with refused("squeue", "slurm_load_jobs error: Unable to contact", kind=NoAnswerError):
        nodes_of("4711")
    assert len(queue.asked()) == 4


def test_jobs_and_their_folders(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a user's environment shows of them, in lines of several clusters and with odd characters."""
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    odd = "a | b\tc\nd"
    own = queued("12", "PENDING", comment=odd, workdir="/here", reason="Priority", elapsed="0:00")
    queue.says(f"CLUSTER: one\n{queued('7', 'RUNNING', comment='(null)', workdir='/elsewhere')}CLUSTER: two\n{own}")
    other, job = my_jobs()
    found = (job.id, job.state, job.comment, job.reason, job.elapsed, job.limit)
    assert found == ("12", "PENDING", odd, "Priority", "0:00", "4:00:00")
    assert (other.comment, other.limit) == ("", "4:00:00")
    assert queue.asked() == [f"--noheader --user={os.getuid()} --format {FORMAT}"]
    assert queue.environment() == []


def test_no_answer_is_not_an_empty_queue(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.says(f"{RECORD}7{FIELD}RUNNING\n")
    with refused("squeue", "read: '7", kind=NoAnswerError):
        my_jobs()
    monkeypatch.setattr(slurm, "SECONDS", 0.2)
    queue.runs("exec sleep 5")
    with refused("squeue", "timed out", kind=NoAnswerError):
        my_jobs()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with refused("squeue is not", "on the PATH", kind=NoAnswerError):
        my_jobs()
