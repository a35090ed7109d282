"""How often a failed job is tried again; without Snakemake."""

import json
import os
from pathlib import Path

import pytest

from longspec.answers.settings import JOURNAL
from longspec.journal import unfinished
from longspec.workflow.jobs.retries import PAUSE, Retries, RetryPolicy


def test_another_job_has_two_tries_more() -> None:
    policy, output = RetryPolicy(0.0), Path("manifest.json")
    assert [policy.other("pack", 50, attempt, output) for attempt in (1, 2, 3)] == [
        Retries(2, PAUSE),
        Retries(2, PAUSE),
        Retries(2),
    ]
    assert policy.other("pack", 1, 1, output).allowed == 1


def test_a_stage_is_tried_as_often_as_allowed_unless_it_is_without_hope(tmp_path: Path) -> None:
    folder, log = tmp_path / "base", tmp_path / "logs/base.log"
    (log.parent / "base").mkdir(parents=True)
    folder.mkdir()
    status = folder / "status.json"
    status.write_text(json.dumps({"state": "failed", "deterministic": True, "reason": "no such key"}))
    os.utime(status, (1, 1))
    policy = RetryPolicy(100.0)
    assert policy.stage(50, 1, folder, log) == Retries(50, PAUSE), "it may have been mended; its job has not begun"
    (log.parent / "base/attempt-1.log").touch()
    assert policy.stage(50, 1, folder, log) == Retries(50, 0)
    os.utime(status, (200, 200))
    hopeless = policy.stage(50, 1, folder, log)
    assert (hopeless.allowed, hopeless.pause) == (0, 0)
    assert hopeless.reason == "it would fail in the same way again: no such key"


@pytest.mark.parametrize(("rule", "output", "lines"), [("evaluate", "x.jsonl", ""), ("answer", "shard.json", JOURNAL)])
def test_a_try_that_measured_or_answered_more_is_not_counted(tmp_path: Path, rule: str, output: str, lines: str) -> None:
    policy, made = RetryPolicy(0.0), tmp_path / output
    journal = made.with_name(lines) if lines else unfinished(made)
    assert policy.other(rule, 50, 1, made) == Retries(2, PAUSE)
    journal.write_text("identity\nmeasured\n")
    assert policy.other(rule, 50, 2, made) == Retries(3, PAUSE)
    assert policy.other(rule, 50, 3, made) == Retries(3)
    journal.write_text("identity\nmeasured\nmeasured\n")
    assert policy.other(rule, 50, 4, made).allowed == 4
    assert policy.other(rule, 50, 1, tmp_path / "another" / output).allowed == 2
