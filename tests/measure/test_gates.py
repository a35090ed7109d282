"""Gates against losses made by hand, and the command that fails on them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longspec import jsonl
from longspec.measure.gates import judge
from longspec.measure.gates import main as check
from tests.refusals import refused
from tests.report.synthetic_run import SETTINGS, line, write_run
from tests.report.test_numbers import report
from tests.report.test_page import read_page

pytestmark = pytest.mark.usefixtures("undrawn")
TASKS = {"short": {"data": "stdlib", "context": [1, 9]}, "long": {"data": "stdlib-long", "context": [1, 9]}}
TINY = SETTINGS | {"prompts": 10, "shapes": [3], "tasks": TASKS}
# Drafted tokens kept in the one round of a prompt: in 0-1k, then in 2-4k.
KEPT = {
    "base": {"short": (3, 3), "long": (1, 1)},
    "long": {"short": (2, 2), "long": (3, 3)},
    "longcot": {"short": (2, 2), "long": (3, 1)},
}
# By hand: 4 tokens a round become 3; 4 become 3 ((4 + 2) / 2); in 0-1k 4, in 2-4k 2.
FORGET_SHORT, FORGET_LONG, CONTEXT_LONG = 0.25, 0.25, 0.5


def write(folder: Path, records: int = 10, kept_of: dict[str, dict[str, tuple[int, int]]] = KEPT) -> list[str]:
    """The run's files; `records`: how many the prompts of each bucket come from."""
    arguments = write_run(folder, {"base": 0.0}, TINY)
    for drafter in ("untrained", "lookup", *KEPT):
        rows = []
        for task in TASKS:
            for prompt in range(20):
                kept = kept_of.get(drafter, {task: (0, 0)})[task][prompt % 2]
                more = {"record": prompt // 2 % records, "context_tokens": (500, 3000)[prompt % 2]}
                rows.append(line(drafter, task, prompt, [kept], 3, **more))
        jsonl.write(folder / "results/base/evaluation" / f"{drafter}.jsonl", rows)
    return arguments


def judged(folder: Path, gates: str, records: int = 10) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    """The rows of the report by gate, comparison and task."""
    arguments = write(folder, records)
    arguments[arguments.index("--gates") + 1] = gates
    return {(row["gate"], row["what"], row["task"]): row for row in report(arguments)["gates"]["base"]}


def head(folder: Path) -> str:
    """The page's text above its first section."""
    return read_page(folder)[2].split("Acceptance length How many")[0]


def run_check(folder: Path) -> None:
    """`python -m longspec.measure gates`."""
    check(["--report", str(folder / "report.json"), "--out", str(folder / "gates.json")])


def test_gates_that_hold(tmp_path: Path) -> None:
    rows = judged(tmp_path, '{"forgetting": 0.25, "context": 0.5}')
    lost = {name: (row["lost"], row["passed"]) for name, row in rows.items()}
    assert lost == {
        ("forgetting", "long after base, on stdlib", "short"): (FORGET_SHORT, True),
        ("forgetting", "longcot after base, on stdlib", "short"): (FORGET_SHORT, True),
        ("forgetting", "longcot after long, on stdlib-long", "long"): (FORGET_LONG, True),
        ("context", "longcot, 2-4k against 0-1k", "short"): (0.0, True),
        ("context", "longcot, 2-4k against 0-1k", "long"): (CONTEXT_LONG, True),
    }
    assert "5 of 5 comparisons of the gates judged, all hold" in head(tmp_path)
    run_check(tmp_path)
    assert [row["passed"] for row in json.loads((tmp_path / "gates.json").read_text())] == [True] * 5


def test_a_gate_that_fails_ends_with_its_figures_and_leaves_the_page(tmp_path: Path) -> None:
    rows = judged(tmp_path, '{"forgetting": 0.24, "context": null}')
    assert {row["passed"] for row in rows.values()} == {False}
    told = ("base: forgetting: long after", "base, on stdlib, task short: ", "4.000 -> 3.000, ", "25.0% lost of 24.0%")
    with refused("3 of 3 comparisons", *told, kind=SystemExit):
        run_check(tmp_path)
    assert not (tmp_path / "gates.json").exists()
    text = read_page(tmp_path)[2]
    assert "3 of 3 comparisons of the gates judged, 3 failed" in head(tmp_path)
    assert "Gate failed: long after base, on stdlib, task short" in text
    assert "forgetting long after base, on stdlib short 4.00" in text


def test_what_the_first_stage_learnt_is_not_forgotten_two_stages_later(tmp_path: Path) -> None:
    """Stage longcot drafts nothing of the first stage's text any more, of the second's as much as that one did."""
    arguments = write(tmp_path, kept_of=KEPT | {"longcot": {"short": (0, 0), "long": (3, 3)}})
    arguments[arguments.index("--gates") + 1] = '{"forgetting": 0.3, "context": null}'
    rows = {row["what"]: (row["lost"], row["passed"]) for row in report(arguments)["gates"]["base"]}
    assert rows == {
        "long after base, on stdlib": (FORGET_SHORT, True),
        "longcot after base, on stdlib": (0.75, False),
        "longcot after long, on stdlib-long": (0.0, True),
    }


def test_what_cannot_be_judged_fails_nothing(tmp_path: Path) -> None:
    """Four records are too few: such prompts say little, whatever they lost."""
    rows = judged(tmp_path, '{"forgetting": 0.0, "context": 0.0}', records=4)
    assert {(row["passed"], row["why"]) for row in rows.values()} == {(None, "4 records are too few to judge by; 8 are needed")}
    run_check(tmp_path)


def test_each_data_set_of_a_mix_is_compared_with_the_last_stage_that_trained_on_it() -> None:
    stages = {"base": ["a", "b"], "chat": ["b", "c"], "last": ["c"]}
    rows = judge(stages, "last", {}, SimpleNamespace(tasks={}), {"forgetting": 0.1, "context": None})  # type: ignore[arg-type]
    assert [(row["what"], row["why"]) for row in rows] == [
        ("chat after base, on a", "no task measures a"),
        ("chat after base, on b", "both stages train on b"),
        ("last after base, on a", "no task measures a"),
        ("last after chat, on b", "no task measures b"),
        ("last after chat, on c", "both stages train on c"),
    ]


def test_a_gate_that_judges_nothing_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Task short reads another dataset than stage base, task long another than stage long; contexts lie in two buckets."""
    arguments = write(tmp_path)
    tasks = {name: task | {"data": "other"} for name, task in TASKS.items()}
    arguments[arguments.index("--settings") + 1] = json.dumps(TINY | {"tasks": tasks})
    arguments[arguments.index("--gates") + 1] = '{"forgetting": 0.3, "context": 0.5}'
    report(arguments)
    assert "2 of 5 comparisons of the gates judged, all hold" in head(tmp_path)
    assert "no task measures stdlib-long" in read_page(tmp_path)[2]
    run_check(tmp_path)
    told = capsys.readouterr().out.splitlines()
    assert sum("not judged, no task measures stdlib" in line for line in told) == 3
    assert told[-1] == "2 of 5 comparisons of the gates judged; 3 not"
    assert [row["passed"] for row in json.loads((tmp_path / "gates.json").read_text())] == [None, None, None, True, True]


def test_a_bucket_of_few_records_does_not_hide_the_others(tmp_path: Path) -> None:
    """One prompt that is longer than all others, kept in full, is not what the shortest contexts are compared with."""
    arguments = write(tmp_path)
    for path in (tmp_path / "results/base/evaluation").glob("*.jsonl"):
        rows = list(jsonl.read(path))
        longer = [
            row | {"prompt": 20, "record": 10, "context_tokens": 5000, "accepted": [3]} for row in rows if row["prompt"] == 0
        ]
        jsonl.write(path, [*rows, *longer])
    arguments[arguments.index("--gates") + 1] = '{"forgetting": null, "context": 0.4}'
    rows = {row["task"]: row for row in report(arguments)["gates"]["base"]}
    assert {row["what"] for row in rows.values()} == {"longcot, 2-4k against 0-1k"}
    assert (rows["long"]["lost"], rows["long"]["passed"]) == (CONTEXT_LONG, False)
