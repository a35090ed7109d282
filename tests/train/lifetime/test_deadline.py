"""The end of a Slurm job as squeue tells it; the stand-in prints what a real one prints for its format %e."""

import time
from datetime import datetime
from pathlib import Path

import pytest
import torch

from longspec.distributed import ALONE, Ranks
from longspec.train import preemption
from longspec.train.arguments import read_deadline, read_job
from tests.refusals import refused

LATER = "2031-05-06T07:08:09"


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue of our own, to be written; this process is in a Slurm job."""
    path = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return path


def prints(squeue: Path, text: str) -> None:
    squeue.write_text(
        f'#!/bin/sh\n[ "$* $SLURM_TIME_FORMAT" = "--noheader --jobs 4711 --format %e standard" ] || exit 9\n{text}\n'
    )
    squeue.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("echo N/A", ""),
        ("exit 1", "squeue does not tell the end of Slurm job 4711, so it is not stopped before: squeue gave no answer"),
        ("echo Bad_Job", "squeue does not tell the end of Slurm job 4711, so it is not stopped before: Invalid isoformat"),
    ],
)
def test_without_a_limit_or_an_answer_there_is_no_deadline(
    squeue: Path, capsys: pytest.CaptureFixture[str], answer: str, why: str
) -> None:
    prints(squeue, answer)
    assert read_deadline("slurm", ALONE, pause=0.01) is None
    assert why in capsys.readouterr().out


def test_outside_of_a_job_nobody_is_asked(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert read_deadline("slurm", ALONE) is None


def test_rank_0_alone_asks_and_an_empty_answer_is_asked_for_again(squeue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prints(squeue, f'[ -e "$0.asked" ] && echo {LATER} || touch "$0.asked"')
    assert read_deadline("slurm", Ranks(1, 1, 2)) is None
    assert read_deadline("slurm", ALONE, pause=0.01) == datetime(2031, 5, 6, 7, 8, 9).timestamp()
    assert "Slurm job 4711 ends" in capsys.readouterr().out


def test_nonsense_is_named() -> None:
    with refused("--deadline: 'tomorrow'"):
        read_job(["--deadline", "tomorrow"], ALONE)


def test_a_save_is_due_after_its_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of minutes would else be lost by the hundred; ranks agree, whose clocks are their own."""
    monkeypatch.setattr(preemption.signal, "signal", lambda *_: None)
    stop = preemption.Stop(60)
    stop.save_seconds = 1800.0
    assert (stop.agreed(), stop.save_due) == (False, False)
    stop._saved -= 1801
    assert (stop.agreed(), stop.save_due) == (False, True)
    stop.saved(2)
    assert (stop.save_due, stop.agreed(), stop.save_due) == (False, False, False)
    monkeypatch.setattr(preemption.dist, "all_reduce", lambda of_all, **_: of_all.copy_(torch.tensor([0, 1])))
    stop.control = object()
    assert (stop.agreed(), stop.save_due) == (False, True)


def test_a_save_and_what_is_estimated_before_it_fit_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first save, of which only the size is known, takes at most a quarter of what is left of a short job; margin 10."""
    monkeypatch.setattr(preemption.signal, "signal", lambda *_: None)
    stop, other = (preemption.Stop(60, time.time() + 100, 10) for _ in range(2))
    stop.expect_save(0, 46)
    assert not stop.agreed()
    stop.deadline = time.time() + 34
    assert (stop.agreed(), stop.reason) == (True, "deadline")
    stop.saved(2)
    assert not stop.agreed(), "by what was measured"
    for longest, stops in ((13, True), (450, False)):  # a single slow one, far beyond a short job, stops no other
        stop.deadline = time.time() + (60 if stops else 36)
        stop.expect_save(longest, 46)
        stop.deadline = time.time() + 34
        assert stop.agreed() is stops
    other._batch_began = time.perf_counter() - 90
    other.saved(2)
    assert other.agreed()
