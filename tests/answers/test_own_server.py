"""Servers that a job starts itself, and their ends."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from longspec.answers import server as own_server
from tests.answers.conftest import Case, journal_of
from tests.refusals import refused
from tests.slurm.cluster import is_running, until
from tests.warm_jobs import popen

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a server answers is seen at once."""
    monkeypatch.setattr(own_server, "LOOK", 0.1)


def command(*words: str) -> str:
    """A server of the job's own."""
    return " ".join([sys.executable, str(STAND_IN), "{model}", "{port}", *words])


def test_the_job_starts_its_server_for_what_is_left_and_ends_it(case: Case, tmp_path: Path) -> None:
    settings = {"engine": "endpoint", "server": command(str(tmp_path / "pid")), "requests": 2}
    made = case.make(tmp_path, **settings)
    assert made["ends"]["answered"] == 14
    assert journal_of(tmp_path)["train", 2]["messages"][1]["content"] == f"by {case.folder}"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    (tmp_path / "pid").unlink()
    (tmp_path / "shard.json").unlink()
    assert case.make(tmp_path, **settings) == made
    assert not (tmp_path / "pid").exists()


def test_a_server_that_ends_is_told_with_its_last_words(case: Case, tmp_path: Path) -> None:
    for when in ("at-once", "later"):
        with refused("regenerate.server", "exit code 7: no memory", tmp_path / "server.log"):
            case.make(tmp_path, engine="endpoint", server=command(str(tmp_path / "pid"), when), tries=2)


def test_a_server_that_wants_a_key_is_known_to_be_there(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"engine": "endpoint", "server": command(str(tmp_path / "pid"), "wants-key")}
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with refused("http://127.0.0.1", "lists no models", "401"):
        case.make(tmp_path, **settings)
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert case.make(tmp_path, **settings)["ends"]["answered"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_ends_ends_its_server(case: Case, tmp_path: Path, number: signal.Signals) -> None:
    """One that a shell has started: killed with -9, or by the end of its terminal, the job has no time to do it itself."""
    pid = tmp_path / "pid"
    server = f"sh -c '{command(str(pid), 'stalls')}; true'"
    settings = {"new_tokens": 12, "cut": "keep", "engine": "endpoint", "server": server}
    files = ["--raw", case.raw, "--target", case.target, "--tokenizer", case.tokenizer, "--out", tmp_path / "shard.json"]
    job = [sys.executable, "-m", "longspec.answers", "shard", *map(str, files), "--settings", json.dumps(settings)]
    process = popen(job)
    until(pid.with_suffix(".asked").exists, 60, "a request to the server")
    process.send_signal(number)
    assert process.wait(30) != 0
    until(lambda: not is_running(int(pid.read_text())), 30, "the server's end")
