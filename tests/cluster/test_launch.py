"""The launcher of a job's ranks: threads, a log for each attempt, last words, signals, an end with its parent."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longspec.cluster.attempt_logs import last_words
from longspec.cluster.launch import main
from tests.refusals import check
from tests.slurm.cluster import is_running, until
from tests.warm_jobs import popen

pytestmark = pytest.mark.slow  # half a minute and more as a whole

# What a rank does: its words are seen in the log.
RANK = r"""
import os, signal, sys, time
from pathlib import Path
from longspec.distributed import find_ranks
ranks, way = find_ranks(), sys.argv[1]
heard = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
print(f"rank {ranks.rank} of {ranks.world_size}, {os.environ['OMP_NUM_THREADS']} threads, pid {os.getpid()}.", flush=True)
if way == "fail":
    while ranks.rank == 0 and not heard:  # that torchrun ends it since the other one failed
        time.sleep(0.05)
    raise RuntimeError(f"broken in {ranks.rank}")
if way == "refuse":
    sys.exit("error: recipe.yaml: line 3: no such key")
if way == "kill" and ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if way == "crash" and ranks.rank == 1:
    raise RuntimeError("before anything could be written down")
if way in ("kill", "crash"):
    while not heard:
        time.sleep(0.1)
    sys.exit(1)
if way == "wait":
    while not heard:
        time.sleep(0.1)
    time.sleep(0.3)
    os.write(1, f"rank {ranks.rank} saved after {' '.join(heard)}\n".encode())  # one write: two ranks' lines stay whole
    sys.exit(1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module to launch, and no Slurm."""
    (tmp_path / "tried.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def launch(folder: Path, way: str, *more: str, **options: Any) -> "subprocess.Popen[bytes]":
    """The launcher, started with two ranks of the module."""
    log = f"--log={folder / 'logs/stage.log'}"
    return popen([sys.executable, "-m", "longspec.cluster", "launch", "--ranks=2", log, *more, "--", "tried", way], **options)


def pids(folder: Path) -> list[int]:
    """The ranks that have begun."""
    log = folder / "logs/stage.log"
    return [int(pid) for pid in re.findall(r"pid (\d+)\.", log.read_text())] if log.exists() else []


def test_one_plain_rank_is_the_process_itself(folder: Path) -> None:
    """Which has its threads and no launcher's variables."""
    (folder / "told.py").write_text("import os; print(os.getpid(), os.environ['OMP_NUM_THREADS'], os.environ.get('RANK'))\n")
    command = [sys.executable, "-m", "longspec.cluster", "launch", "--plain", "--cpus=3"]
    process = subprocess.Popen([*command, "--ranks=1", "--", "told"], stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, f"{process.pid} 3 None\n")


def test_ranks_share_the_cores_of_all_tasks_also_in_a_container_without_srun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = folder / "bin"
    bare.mkdir()
    for name, path in (("env", "/usr/bin/env"), ("sh", "/bin/sh")):
        (bare / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert launch(folder, "pass", "--plain", "--tasks=8", "--cpus=8").wait(60) == 0
    text = (folder / "logs/stage.log").read_text()
    assert sorted(re.findall(r"rank (\d) of 2, (\d+) threads", text)) == [("0", "32"), ("1", "32")]
    assert "no srun here" in text


def test_each_attempt_has_its_log_which_ends_with_the_first_failing_ranks_words(folder: Path) -> None:
    for way in ("fail", "refuse"):
        assert launch(folder, way).wait(60) == 1
        assert not (folder / "logs/stage.log").readlink().is_absolute()
        (folder / "logs/stage.log").rename(folder / "logs/link")  # Snakemake removes a job's log before it starts it
        (folder / "logs/link").unlink()
    first, second = sorted((folder / "logs/stage").iterdir())
    assert (first.name, second.name) == ("attempt-001.log", "attempt-002.log")
    last = [path.read_text().rstrip().splitlines()[-1] for path in (first, second)]
    assert last == ["RuntimeError: broken in 1", "error: recipe.yaml: line 3: no such key"]


def test_torchrun_names_a_killed_rank_and_one_that_wrote_nothing_down_keeps_its_traceback(folder: Path) -> None:
    texts = []
    for way in ("kill", "crash"):
        assert launch(folder, way).wait(60) == 1
        texts.append((folder / "logs/stage.log").read_text())
    assert re.search(r"Root Cause.*?rank +: 1 .*?exitcode +: -9 ", texts[0], re.DOTALL)
    assert "RuntimeError: before anything could be written down" in texts[1]


def test_without_a_raised_error_the_told_one_is_the_last_word() -> None:
    text = "12:00:01 error: no room\nnoise\n12:00:03 error: of no interest\n"
    assert last_words(text) == "error: no room"
    assert last_words("all is well\n") == ""


@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, True), (signal.SIGHUP, True)]
)
def test_a_signal_reaches_the_ranks_once_and_they_are_waited_for(folder: Path, number: int, whole_group: bool) -> None:
    """To the launcher alone, as `kill` does; to its group, as a terminal's Ctrl-C or its end does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup nobody hears it
    process = launch(folder, "wait", start_new_session=True)
    signal.signal(signal.SIGHUP, before)
    until(lambda: len(pids(folder)) == 2, 60, "two ranks")
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert process.wait(60) == 1
    text = (folder / "logs/stage.log").read_text()
    name = signal.Signals(number).name
    assert sorted(re.findall(r"rank \d saved after .*", text)) == [f"rank {rank} saved after {name}" for rank in (0, 1)]


def test_no_rank_outlives_a_killed_launcher(folder: Path) -> None:
    process = launch(folder, "wait")
    until(lambda: len(pids(folder)) == 2, 60, "two ranks")
    process.kill()
    process.wait()
    until(lambda: not any(is_running(pid) for pid in pids(folder)), 20, "the ranks' end")


def test_what_cannot_be_started_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "2"]) == 1
    check(capsys.readouterr().err, "error: nothing to start", "-- MODULE ARGUMENTS")
    assert main(["--nodes", "2", "--ranks", "1", "--", "tried"]) == 1
    check(capsys.readouterr().err, "error: --nodes 2", "mpi=srun", "tasks_per_node=", "profiles/slurm/profile.yaml")
