"""The end of a Slurm job as squeue tells it; the stand-in prints what a real one prints for its format %e."""

import time
from datetime import datetime
from pathlib import Path

import pytest

from longspec.distributed import Ranks
from longspec.train.arguments import read_job, slurm_deadline

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


def test_no_limit_and_no_job(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints(squeue, "echo N/A")
    assert slurm_deadline() == (None, "Slurm job 4711 has no time limit")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm_deadline() == (None, "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no squeue on the PATH"),
        ("echo Bad_Job", "Invalid isoformat string: 'Bad_Job'"),
    ],
)
def test_no_answer_is_told(squeue: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, why: str) -> None:
    if text is None:
        monkeypatch.setenv("PATH", str(squeue.parent))  # there may be a Slurm on this machine
    else:
        prints(squeue, text)
    end, message = slurm_deadline(pause=0.01)
    assert end is None
    assert message.startswith(f"squeue does not tell the end of Slurm job 4711, so it is not stopped before: {why}")


def test_an_empty_answer_is_asked_for_again(squeue: Path) -> None:
    prints(squeue, f'[ -e "$0.asked" ] && echo {LATER} || touch "$0.asked"')
    assert slurm_deadline(pause=0.01)[0] == datetime(2031, 5, 6, 7, 8, 9).timestamp()


def test_rank_0_alone_asks(squeue: Path, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path) -> None:
    prints(squeue, f"echo {LATER}")
    options = ["-cp", str(root / "config/exp"), "-cn", "qwq_glide_8gpu_slim6b", "--deadline", "slurm"]
    options += [f"files.{name}={tmp_path / name}" for name in ("target", "data", "out")]
    first, second = (read_job(options, Ranks(rank, 2, rank)) for rank in (0, 1))
    assert first.deadline == time.mktime(datetime(2031, 5, 6, 7, 8, 9).timetuple())
    assert second.deadline is None
    assert "Slurm job 4711 ends" in capsys.readouterr().out


def test_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="--deadline: 'tomorrow' is neither seconds since 1970 nor 'slurm'"):
        read_job(["--deadline", "tomorrow"], Ranks(0, 1, 0))
