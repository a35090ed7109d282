"""Which of Slurm's states end a job, and how often a failed one is tried again; without Snakemake."""

import json
import os
from pathlib import Path

from longspec.journal import unfinished
from longspec.workflow.jobs.retries import PAUSE, KnownStates, Retries, RetryPolicy


def test_states_are_told_in_words_the_executor_knows() -> None:
    known = KnownStates()
    states = known.translate({"11": "CANCELLED by 0", "12": "RUNNING", "13": "PREEMPTED", "14": "NODE_FAIL"})
    assert states == {"11": "CANCELLED", "12": "RUNNING", "13": "FAILED", "14": "FAILED"}


def test_a_job_that_slurm_has_forgotten_is_judged_by_its_files() -> None:
    known = KnownStates()
    known.translate({"1": "RUNNING", "2": "RUNNING"})
    assert known.translate({"2": "COMPLETED"}) == {"1": "UNKNOWN", "2": "COMPLETED"}
    assert known.translate({}) == {"1": "UNKNOWN", "2": "UNKNOWN"}


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


def test_a_try_of_an_evaluation_that_measured_more_is_not_counted(tmp_path: Path) -> None:
    evaluated = tmp_path / "lookup.jsonl"
    policy = RetryPolicy(0.0)
    assert policy.other("evaluate", 50, 1, evaluated).allowed == 2
    unfinished(evaluated).write_text("identity\nmeasured\n")
    assert policy.other("evaluate", 50, 2, evaluated).allowed == 3
    assert policy.other("evaluate", 50, 3, evaluated).allowed == 3
    unfinished(evaluated).write_text("identity\nmeasured\nmeasured\n")
    assert policy.other("evaluate", 50, 4, evaluated).allowed == 4
    assert policy.other("evaluate", 50, 1, tmp_path / "other.jsonl").allowed == 2
