"""How often a failed job is tried again, and when a stage is not; without Snakemake."""

import json
import os
from pathlib import Path

import pytest

from longspec.workflow.jobs.retries import FRUITLESS, PAUSE, reason_to_give_up, retries

BEGAN = 1000.0


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    (tmp_path / "stage").mkdir()
    return tmp_path / "stage"


def put(path: Path, time: float, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time, time))


def given_up(stage: Path) -> str:
    return reason_to_give_up(stage, stage.parent / "logs/stage.log", BEGAN)


def attempts(stage: Path, *times: float) -> None:
    for number, time in enumerate(times, start=1):
        put(stage.parent / f"logs/stage/attempt-{number:03d}-job-{number}.log", time)


@pytest.mark.parametrize(
    ("status", "time", "expected"),
    [
        ({"state": "failed", "deterministic": True, "reason": "no such key"}, BEGAN + 1, "in the same way again: no such key"),
        ({"state": "failed", "deterministic": True, "reason": "mended since"}, BEGAN - 1, ""),
        ({"state": "failed", "deterministic": False, "reason": "a rank was lost"}, BEGAN + 1, ""),
    ],
)
def test_what_the_stage_itself_says(stage: Path, status: dict[str, object], time: float, expected: str) -> None:
    assert given_up(stage) == ""
    put(stage / "status.json", time, json.dumps(status))
    assert given_up(stage).endswith(expected)
    assert bool(given_up(stage)) == bool(expected)
    told = retries("train", 50, 1, stage / "checkpoint.json", stage.parent / "logs/stage.log", BEGAN, {})
    assert told == ((0, 0, given_up(stage)) if expected else (50, PAUSE, ""))


def test_tries_without_a_checkpoint_are_counted_from_the_last_one(stage: Path) -> None:
    ends = [BEGAN + 10 * number for number in range(1, FRUITLESS + 1)]
    attempts(stage, *ends[:-1])
    assert given_up(stage) == ""
    attempts(stage, *ends)
    assert f"{FRUITLESS} tries in a row" in given_up(stage)
    put(stage / "checkpoints/last_2/manifest.json", BEGAN + 5)  # the first of them saved: the others were in vain
    assert given_up(stage) == ""
    attempts(stage, *ends, ends[-1] + 1)
    assert f"{FRUITLESS} tries in a row" in given_up(stage)
    put(stage / "checkpoints/last/manifest.json", ends[-1])
    assert given_up(stage) == ""


def test_a_stage_that_gets_on_has_no_last_try_but_jobs_that_never_begin_have_one(stage: Path) -> None:
    """Snakemake sends a job again while its tries are as many as its attempts."""
    log, ends = stage.parent / "logs/stage.log", [BEGAN + 10 * number for number in range(1, 8)]
    attempts(stage, *ends)
    put(stage / "checkpoints/last/manifest.json", ends[-1])
    for attempt, tries, pause in ((7, 10, 0), (8, 10, PAUSE)):
        assert retries("train", 3, attempt, stage / "checkpoint.json", log, BEGAN, {}) == (tries, pause, "")
    assert retries("train", 3, 4, stage / "checkpoint.json", log.with_name("none.log"), BEGAN, {}) == (3, PAUSE, "")


def test_a_job_that_starts_from_the_beginning_has_two_tries_more() -> None:
    for allowed, tries in ((50, 2), (1, 1)):
        assert retries("pack", allowed, 1, Path("manifest.json"), Path(), BEGAN, {}) == (tries, PAUSE, "")


@pytest.mark.parametrize(
    ("rule", "output", "saved"),
    [
        ("answer", "0-of-2/shard.json", "0-of-2/journal.jsonl"),
        ("build_states", "0-of-2/shard.json", "0-of-2/rows-0-7.safetensors"),
        ("evaluate", "base.jsonl", "base.unfinished.jsonl"),
    ],
)
def test_a_job_that_resumes_is_given_up_after_ten_tries_that_saved_nothing(
    tmp_path: Path, rule: str, output: str, saved: str
) -> None:
    """Each attempt in turn, by the bytes that stand there when it has failed; its tries are as many as Snakemake allows."""
    seen: dict[Path, tuple[int, int]] = {}
    tries = []
    for attempt, size in enumerate([0, 10, 10, *[500] * 11], start=1):
        put(tmp_path / saved, BEGAN, "x" * size)
        put(tmp_path / "other.jsonl", BEGAN, "x" * attempt)  # says nothing about this job
        tries.append(retries(rule, 50, attempt, tmp_path / output, Path(), BEGAN, seen)[0])
    assert tries == [9, 11, 11, *[13] * 11]  # the last attempt is the fourteenth: ten behind the fourth saved nothing
    assert retries(rule, 3, 1, tmp_path / "another/shard.json", Path(), BEGAN, seen)[0] == 3
