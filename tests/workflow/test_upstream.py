"""The faults that rules/upstream.smk mends: upstream, where a test fails once one is mended, and here."""

import asyncio
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from longspec.workflow.jobs.retries import known_states
from tests.workflow.calls import begun
from tests.workflow.warm import snakemake

SNAKEFILE = """
rule all:
    input: "draft"
rule train:
    input: "rows"
    output: "draft"
    shell: "cp {{input}} {{output}}"
rule pack:
    input: "records"
    output: "rows"
    params: words=config.get("words", "old")
    shell: "{command}"
"""
WELL = "cat {input} > {output}; echo {params.words} >> {output}"
OPTIONS = ["all", "-c1", "--rerun-incomplete", "--rerun-triggers", "mtime", "params", "input", "--latency-wait", "0"]
NOTHING = "Nothing to be done"


class Place:
    """A folder with this workflow, in which a call has ended well. rules: what it includes."""

    def __init__(self, folder: Path, rules: Path | None) -> None:
        self.folder, self.rules = folder, rules
        self.records("old")
        self.call()
        assert self.draft == "old\nold\n"

    def records(self, text: str) -> None:
        """Write what the first rule reads."""
        (self.folder / "records").write_text(f"{text}\n")

    def arguments(self, command: str = WELL, words: str = "old") -> list[str]:
        """Return the call's arguments, for a middle rule with this command and param."""
        include = "" if self.rules is None else f'include: "{self.rules}"\n'
        (self.folder / "Snakefile").write_text(include + SNAKEFILE.format(command=command))
        return [*OPTIONS, "--config", f"words={words}"]

    def call(self, command: str = WELL, words: str = "old", code: int = 0) -> str:
        """Return what a whole call says."""
        done = snakemake(self.arguments(command, words), self.folder, os.environ)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def draft(self) -> str:
        """What the last rule has made."""
        return (self.folder / "draft").read_text()


@pytest.fixture
def place(tmp_path: Path, root: Path) -> Place:
    return Place(tmp_path, root / "rules/upstream.smk")


@pytest.mark.slow
def test_snakemake_forgets_a_failed_job(tmp_path: Path) -> None:
    place = Place(tmp_path, None)
    place.records("new")
    place.call("false", code=1)
    assert not (tmp_path / "rows").exists()
    assert NOTHING in place.call()
    assert place.draft == "old\nold\n"


@pytest.mark.slow
def test_a_failed_job_runs_again_and_what_follows_too(place: Place) -> None:
    """A job that fails at its end, or leaves nothing."""
    place.records("new")
    for command, words in ((f"{WELL}; false", "1"), ("true", "2")):
        before = place.draft
        place.call(command, words, code=1)
        assert not (place.folder / "rows").exists()
        assert place.draft == before
        place.call(words=words)
        assert place.draft == f"new\n{words}\n"
    (place.folder / "rows").unlink()  # by a person who tidies the disk: only what a job has begun is missed
    assert NOTHING in place.call(words="2")


@pytest.mark.slow
def test_a_killed_call_runs_its_job_again(place: Place) -> None:
    place.records("new")
    command = [sys.executable, "-m", "snakemake", *place.arguments("touch begun; sleep 60")]
    with begun(command, place.folder) as process:
        assert not (place.folder / "rows").exists()
        os.killpg(process.pid, signal.SIGKILL)
    snakemake(["--unlock"], place.folder, os.environ)
    place.call()
    assert place.draft == "new\nold\n"
    assert NOTHING in place.call()


@pytest.mark.slow
def test_snakemake_lets_no_rule_say_which_failure_is_worth_another_try(tmp_path: Path) -> None:
    text = 'def worth(attempt):\n    return 1\nrule all:\n    output: "x"\n    retries: worth\n    shell: "touch {output}"\n'
    (tmp_path / "Snakefile").write_text(text)
    done = snakemake(["-n"], tmp_path, os.environ)
    assert "Retries values have to be integers" in done.stdout + done.stderr


class Executor:
    """The Slurm executor with one job, 7, and a Slurm that answers as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: dict[str, str], min_job_age: int | None = 300) -> None:
        self.asked, self.own = "", MagicMock(_preemption_warning=False, _failed_nodes=set(), _status_query_calls=0)
        own, settings = self.own, {"status_attempts": 1, "requeue": False, "init_seconds_before_status_checks": 20}
        own.status_rate_limiter, own.get_status_command = nullcontext(), lambda: "squeue"
        own.workflow.executor_settings = SimpleNamespace(**settings)
        own._status_query_failures, own._status_query_total_seconds, own.next_seconds_between_status_checks = 0, 0.0, 20
        own._status_query_min_seconds = own._status_query_max_seconds = 0.0

        async def query(command: str, logger: Any) -> tuple[dict[str, str], float]:
            self.asked = command
            return states, 0.1

        monkeypatch.setattr(plugin, "query_job_status", query)
        monkeypatch.setattr(plugin, "get_min_job_age", lambda: min_job_age)
        monkeypatch.setattr(plugin, "is_query_tool_available", lambda _: True)
        monkeypatch.setattr(plugin.subprocess, "check_output", lambda *_, **__: "a[1-8]\n")

    def waits(self) -> bool:
        """Whether it goes on waiting for the job when it has asked Slurm."""
        job = SubmittedJobInfo(MagicMock(), "7", {})

        async def asked() -> list[SubmittedJobInfo]:
            return [each async for each in plugin.Executor.check_active_jobs(self.own, [job])]

        return asyncio.run(asked()) == [job]


def translated(states: dict[str, str]) -> dict[str, str]:
    """The states as the executor is told here at Slurm's third such answer, where Slurm has known the job."""
    seen: dict[str, int] = {}
    assert known_states({"7": "RUNNING", "8": "CANCELLED by 0"}, seen) == {"7": "RUNNING", "8": "CANCELLED"}
    assert states or [known_states({}, seen) for _ in range(2)] == [{}, {}], "a busy squeue may say nothing"
    return known_states(states, seen)


@pytest.mark.parametrize("states", [{"7": "PREEMPTED"}, {"7": "LAUNCH_FAILED"}, {}], ids=str)
def test_the_executor_waits_for_ever_for_a_job_that_has_ended(states: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one has been forgotten; here its files are looked for then."""
    assert Executor(monkeypatch, states).waits()
    executor = Executor(monkeypatch, translated(states))
    assert not executor.waits()
    assert executor.own.report_job_error.called == bool(states)
    assert executor.own.report_job_success.called != bool(states)


def test_the_executor_avoids_all_nodes_of_a_job_that_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for states, avoided in (({"7": "NODE_FAIL"}, {"a[1-8]"}), (translated({"7": "NODE_FAIL"}), set())):
        executor = Executor(monkeypatch, states)
        assert not executor.waits()
        assert executor.own.report_job_error.called
        assert executor.own._failed_nodes == avoided


def test_the_executor_turns_to_sacct_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for min_job_age, command in ((300, "squeue"), (None, "sacct")):
        executor = Executor(monkeypatch, {"7": "RUNNING"}, min_job_age)
        assert executor.waits()
        assert command in executor.asked
