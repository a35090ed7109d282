"""How often a failed job is tried again; without Snakemake."""

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
