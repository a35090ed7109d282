"""That one job at a time writes into a stage's folder: on one machine, on several, and after one was taken for dead."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from longspec import lease
from longspec.atomic_files import write_json
from longspec.lease import Lease, acquire, read
from tests.jobs import Job, MakeJob, finish
from tests.refusals import refused
from tests.train.test_job import assert_same

pytestmark = pytest.mark.slow  # half a minute and more as a whole

PACE = {"BEAT": 0.05, "STALE": 1.0, "SETTLE": 0.2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The lease's times of a test; where a process would end, an exception tells. No lease's thread outlives the test."""
    made: list[Lease] = []
    init = Lease.__init__

    def noted(self: Lease, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Lease, "__init__", noted)
    for name, seconds in PACE.items():
        monkeypatch.setattr(lease, name, seconds)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of a lease's thread that would have ended the process
    yield
    for one in made:
        stand_still(one)


def stand_still(held: Lease) -> None:
    """From now on this lease's beat does not move."""
    held._ended.set()
    held._thread.join()


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / lease.LEASE).read_text())


def is_held_by(out: Path, holder: Lease) -> bool:
    holder.check()
    return content(out)["holder"] == holder.holder and not content(out)["released"]


@contextmanager
def beating(out: Path, **holder: Any) -> Iterator[None]:
    """A lease that another machine keeps renewing."""
    write_json(out / lease.LEASE, {"holder": "other", "job": "77", "host": "node7", "pid": 5, "released": False} | holder)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(lease.BEAT):
            os.utime(out / lease.LEASE)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_fresh_folder_says_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    held = acquire(tmp_path / "out", "node3")
    found = content(tmp_path / "out")
    assert found == found | {"job": "4711", "host": "node3", "pid": os.getpid(), "released": False}
    held.release()
    assert content(tmp_path / "out") == found | {"released": True}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [lease.LOCK, lease.LEASE]
    assert is_held_by(tmp_path / "out", acquire(tmp_path / "out", "node4"))
    assert capsys.readouterr().out == ""  # taken without watching


def test_a_second_job_on_the_machine_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    held = acquire(tmp_path, "node3")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    with refused(tmp_path, f"on node3, process {os.getpid()}", f"end it (kill {os.getpid()} on node3)"):
        acquire(tmp_path, "node3")
    assert is_held_by(tmp_path, held)


def killed(out: Path) -> int:
    """Process id of a job on this machine that was killed while it held the folder."""
    program = "import sys, time, pathlib; from longspec.lease import acquire; a = acquire(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"{program}; print(flush=True); time.sleep(1000)", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    return process.pid


def test_a_killed_holder_on_this_machine_is_known_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = killed(tmp_path)
    assert is_held_by(tmp_path, acquire(tmp_path))
    told = capsys.readouterr().out
    assert re.search(rf"taken over from a job on \S+, process {pid}, which is gone", told)
    assert "waiting" not in told


def test_of_a_holder_elsewhere_only_the_beat_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alive it is not replaced, although its process is not here and no lock of it is seen; silent it is."""
    killed(tmp_path)
    elsewhere = content(tmp_path) | {"host": "other"}
    with beating(tmp_path, **elsewhere), refused(tmp_path, "on other, process"):
        acquire(tmp_path)
    assert content(tmp_path) == elsewhere
    capsys.readouterr()
    began = time.monotonic()
    held = acquire(tmp_path)
    assert time.monotonic() - began >= PACE["STALE"]
    assert is_held_by(tmp_path, held)
    assert re.search(
        r"taken over from .* on other, process \d+, which has given no sign of life for 1 s", capsys.readouterr().out
    )


def test_a_lock_that_a_dead_machine_left_is_no_sign_of_life(tmp_path: Path) -> None:
    """A server of files keeps a dead machine's locks until it comes back."""
    with (tmp_path / lease.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with beating(tmp_path), refused(tmp_path, "on node7, process 5", "scancel 77"):
            acquire(tmp_path)
        held = acquire(tmp_path)
        assert is_held_by(tmp_path, held)
        held.release()
        assert is_held_by(tmp_path, acquire(tmp_path)), "given back on this machine, which never had the lock"


def test_of_many_that_take_over_at_once_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # which other machines do not see
    monkeypatch.setattr(lease, "STALE", 0.3)
    monkeypatch.setattr(lease, "SETTLE", 1.0)
    together = threading.Barrier(4)
    write_json(tmp_path / lease.LEASE, {"holder": "dead", "host": "node0", "released": False})

    def attempt(host: str) -> Lease | ValueError:
        together.wait()
        try:
            return acquire(tmp_path, host)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(attempt, [f"node{taker}" for taker in range(1, 5)]))
    [winner] = [one for one in found if isinstance(one, Lease)]
    assert is_held_by(tmp_path, winner)


def test_a_holder_that_was_taken_for_dead_learns_it_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    first = acquire(tmp_path, "node1")
    stand_still(first)  # as if it were frozen
    second = acquire(tmp_path, "node2")
    stand_still(second)
    before = read(tmp_path)
    with pytest.raises(SystemExit):
        first.check()
    assert "lease.json: the holder of this folder is a job on node2" in capsys.readouterr().out
    first._ended.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", lambda _: pytest.fail("beats before it looks"))
        with pytest.raises(SystemExit):
            first._renew()
    first.release()  # to a file that is nobody's
    os.utime(first._file.fileno())  # as a last beat of one that looked just before the other came
    assert read(tmp_path) == before
    second.check()
    (tmp_path / lease.LEASE).unlink()
    with pytest.raises(SystemExit):
        second.check()


def written(job: Job) -> dict[str, tuple[int, bytes]]:
    """Everything in a job's folder: paths, times and bytes."""
    files = [path for path in job.out.rglob("*") if path.is_file()]
    return {str(path.relative_to(job.out)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_frozen_job_writes_nothing_when_it_goes_on(make_job: MakeJob) -> None:
    """Right before it commits a checkpoint. Another one has taken its folder over, and is not disturbed by it."""
    frozen, whole = (make_job(name, ["recipe.steps=8"]) for name in ("frozen", "whole"))
    frozen.launcher = [sys.executable, "-m", "tests.train.lifetime.troubled", "frozen"]
    process = frozen.start()
    stat = Path(f"/proc/{process.pid}/stat")
    frozen.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", process)
    (frozen.out / lease.LOCK).unlink()  # from a machine that its lock does not reach
    other = acquire(frozen.out, "node2")
    stand_still(other)
    before = written(frozen)
    process.send_signal(signal.SIGCONT)
    text, code = finish(process)
    assert code == os.EX_TEMPFAIL
    assert "it ends and writes nothing more" in text
    assert written(frozen) == before
    other.release()
    frozen.launcher = whole.launcher
    whole.run()
    assert "starting at step 0" in frozen.run()
    assert_same(whole, frozen)
