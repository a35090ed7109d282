"""Slurm's queue as squeue tells it; the stand-in prints what a real one prints for its format."""

import os
from pathlib import Path

import pytest

from longspec.cluster.queue import FIELD, FORMAT, RECORD, my_jobs
from longspec.slurm import NoAnswerError
from tests.cluster.queue import Queue, queued


def test_jobs_and_their_folders(queue: Queue, tmp_path: Path) -> None:
    odd = "a | b\tc\nd"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    own = queued("12", "PENDING", comment=odd, workdir=str(tmp_path / "real"), reason="Priority", elapsed="0:00")
    queue.holds(queued("7", "RUNNING", workdir="/elsewhere"), own)
    other, job = my_jobs()
    assert (job.id, job.state, job.comment, job.reason, job.elapsed, job.limit) == (
        "12", "PENDING", odd, "Priority", "0:00", "4:00:00",
    )  # fmt: skip
    assert (job.is_of(tmp_path / "link"), other.is_of(tmp_path / "link")) == (True, False)


def test_what_is_asked(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    queue.holds()
    assert my_jobs() == []
    assert queue.asked() == [f"--noheader --user={os.getuid()} --format {FORMAT}"]
    assert queue.environment() == []
    assert RECORD not in FORMAT[1:]
    assert FORMAT.split(FIELD)[-1] == "%l"


def test_lines_of_several_clusters_and_missing_fields(queue: Queue) -> None:
    queue.says("CLUSTER: one\n" + queued("1", "RUNNING", comment="(null)") + "CLUSTER: two\n" + queued("2", "COMPLETING"))
    first, second = my_jobs()
    assert (first.id, first.comment, first.limit) == ("1", "", "4:00:00")
    assert (second.id, second.state) == ("2", "COMPLETING")


def test_no_answer_is_not_an_empty_queue(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.fails("squeue: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(NoAnswerError, match="squeue gave no answer: squeue: error: Unable to contact"):
        my_jobs()
    queue.says(f"{RECORD}7{FIELD}RUNNING\n")
    with pytest.raises(NoAnswerError, match="an answer that cannot be read: '7"):
        my_jobs()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(NoAnswerError, match="there is no squeue on the PATH"):
        my_jobs()


def test_a_controller_that_hangs(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspec.slurm.SECONDS", 0.2)
    queue.runs("exec sleep 5")
    with pytest.raises(NoAnswerError, match=r"squeue gave no answer: .*timed out"):
        my_jobs()
