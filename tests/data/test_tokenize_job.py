"""A tokenize job as a process: killed in its midst, and its memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspec.atomic_files import check_files, read_json
from longspec.data import tokenize
from tests.corpus import write_raw

TEXT = "the quick brown fox jumps over the lazy dog and finds " * 60


def job(raw: Path, tokenizer: Path, out: Path) -> list[str]:
    verb = [sys.executable, "-m", "longspec.data", "tokenize"]
    return [*verb, "--raw", str(raw), "--tokenizer", str(tokenizer), "--out", str(out)]


def kill_midway(command: list[str], folder: Path) -> None:
    """Start the job and kill it once it has written some of its shard."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size > 0 for path in folder.glob(f".*.{process.pid}.tmp")):
        assert process.poll() is None, "it ended before it could be killed: give it more to do"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def finals(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.slow
def test_killed_job_leaves_nothing_and_its_rerun_gives_the_same(tmp_path: Path, tokenizer_manifest: Path) -> None:
    raw = write_raw(tmp_path / "raw", [{"text": f"{n} {TEXT}"} for n in range(700)])
    out, other = tmp_path / "tokens" / "000.json", tmp_path / "other" / "000.json"
    out.parent.mkdir()
    kill_midway(job(raw, tokenizer_manifest, out), out.parent)
    assert finals(out.parent) == set()
    assert len(list(out.parent.iterdir())) == 1
    # Of a process that lives nothing is removed.
    mine = out.parent / f".000.arrow.{os.getppid()}.tmp"
    mine.write_text("")
    tokenize.make(raw, tokenizer_manifest, 0, 1, out)
    assert {path.name for path in out.parent.iterdir()} == {"000.arrow", "000.json", ".000.json.seen", mine.name}
    tokenize.make(raw, tokenizer_manifest, 0, 1, other)
    for name in ("000.arrow", "000.json"):
        assert (out.parent / name).read_bytes() == (other.parent / name).read_bytes()
    # Killed while it makes a finished shard anew, it leaves that one whole.
    kill_midway(job(raw, tokenizer_manifest, out), out.parent)
    check_files(out.parent, read_json(out)["files"])
