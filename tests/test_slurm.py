"""The one place that asks squeue, and who needs its answer."""

import re
from pathlib import Path

import pytest

from longspec import slurm
from longspec.cluster.launch import nodes_of
from longspec.slurm import NoAnswerError
from tests.cluster.queue import Queue


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


def test_nobody_else_asks_squeue(root: Path) -> None:
    """By the command's name as a string of its own, or with arguments behind it."""
    command = re.compile(r"""["']squeue(?:["']| -)""")
    sources = [*(root / "src/longspec").rglob("*.py")]
    assert [path.name for path in sources if command.search(path.read_text())] == ["slurm.py"]


def test_the_nodes_of_a_job(queue: Queue) -> None:
    queue.says("n[1-2]\n")
    assert nodes_of("4711") == ["n1", "n2"]
    assert queue.asked() == ["--noheader --jobs 4711 --format %N"]


def test_a_scheduler_that_is_away_for_a_moment_is_asked_again(queue: Queue, tmp_path: Path) -> None:
    queue.runs(f"[ -e {tmp_path}/there ] && exec echo 'n[1-2]'\ntouch {tmp_path}/there\necho down >&2; exit 1")
    assert nodes_of("4711") == ["n1", "n2"]
    assert len(queue.asked()) == 2


def test_one_that_stays_away_is_an_error_after_four_tries(queue: Queue) -> None:
    queue.fails("slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(NoAnswerError, match="squeue gave no answer: slurm_load_jobs error: Unable to contact"):
        nodes_of("4711")
    assert len(queue.asked()) == 4
    queue.says("\n")
    with pytest.raises(NoAnswerError, match="Slurm tells no nodes of job 4711"):
        nodes_of("4711")
