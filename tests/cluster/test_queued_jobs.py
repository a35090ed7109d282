"""Slurm's queue as squeue tells it; the stand-in prints what a real one prints for its format."""

import os
from pathlib import Path

import pytest

from longspec.cluster.queued_jobs import FIELD, FORMAT, RECORD, jobs_of_folder, my_jobs
from longspec.slurm import NoAnswerError
from tests.cluster.queue import Queue, queued

OTHER = queued("7", "RUNNING", workdir="/elsewhere")


def test_jobs_of_a_folder(queue: Queue, tmp_path: Path) -> None:
    odd = "a | b\tc\nd"
    queue.holds(OTHER, queued("12", "PENDING", comment=odd, workdir=str(tmp_path), reason="Priority", elapsed="0:00"))
    [job] = jobs_of_folder(tmp_path)
    assert (job.id, job.state, job.comment, job.reason, job.nodes) == ("12", "PENDING", odd, "Priority", "")
    assert (job.elapsed, job.limit, job.has_ended) == ("0:00", "4:00:00", False)
    assert [job.id for job in my_jobs()] == ["7", "12"]


def test_the_folder_by_another_name(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    queue.holds(queued("7", "RUNNING", workdir=str(tmp_path / "real")))
    assert [job.id for job in jobs_of_folder(tmp_path / "link")] == ["7"]


def test_what_is_asked(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    queue.holds()
    assert my_jobs(with_ended=True) == []
    assert queue.asked() == [f"--noheader --user={os.getuid()} --format {FORMAT} --states=all"]
    assert queue.environment() == []
    assert RECORD not in FORMAT[1:]
    assert FORMAT.split(FIELD)[-1] == "%l"


def test_lines_of_several_clusters_and_missing_fields(queue: Queue) -> None:
    queue.says("CLUSTER: one\n" + queued("1", "RUNNING", comment="(null)") + "CLUSTER: two\n" + queued("2", "TIMEOUT"))
    first, second = my_jobs()
    assert (first.id, first.comment, first.limit) == ("1", "", "4:00:00")
    assert (second.id, second.has_ended) == ("2", True)


def test_no_answer_is_not_an_empty_queue(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.fails("squeue: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(NoAnswerError, match="squeue gave no answer: squeue: error: Unable to contact"):
        jobs_of_folder(tmp_path)
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
