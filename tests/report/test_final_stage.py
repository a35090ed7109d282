"""A report of a run whose published stage was chosen: its final draft, and what is left out of every figure."""

from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json, write_json
from longspec.chain_length import read_acceptance
from longspec.report.inputs import records_that_chose
from tests.report.synthetic_run import STAGES, write_run
from tests.report.test_numbers import report
from tests.report.test_page import read_page

RECORDS = {"stdlib": [1, 5], "stdlib-long": [2], "puzzles": [3, 4, 9]}  # two prompts of each
OF_TASK = {"short": RECORDS["stdlib"], "long": RECORDS["stdlib-long"], "cot": RECORDS["puzzles"]}
PROMPTS = {task: 2 * len(lines) for task, lines in OF_TASK.items()}
FIGURE = {"mean": 2.5, "low": 2.25, "high": 2.75, "prompts": 12, "tokens": 99, "documents": 6}


def choose(folder: Path, stage: str = "long") -> None:
    """Have a stage of the variant base published."""
    path = folder / "final_draft/provenance.json"
    choice: dict[str, Any] = {"stage": stage, "why": "the best", "prompts": PROMPTS, "records": RECORDS}
    choice["figures"] = {name: FIGURE | {"mean": 2.5 + 0.1 * (name == stage)} for name in STAGES}
    choice["against_last"] = {"difference": 0.1, "low": 0.02, "high": 0.18, "improved": True}
    write_json(path, read_json(path) | {"final": choice})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chosen run, reported."""
    path = tmp_path_factory.mktemp("chosen")
    arguments = write_run(path, {"base": 0.0})
    choose(path / "results/base")
    report(arguments)
    return path


def test_every_figure_is_of_what_is_left(folder: Path, tmp_path: Path) -> None:
    """As of a run that has never measured these records, but for its final draft."""
    arguments = write_run(tmp_path, {"base": 0.0})
    for path in (tmp_path / "results/base/evaluation").iterdir():
        jsonl.write(path, [row for row in list(jsonl.read(path)) if row["record"] not in OF_TASK[row["task"]]])
    wanted, found = report(arguments), read_json(folder / "report.json")
    assert found["left_out"]["base"] == PROMPTS
    assert wanted["left_out"]["base"] == {}
    same = (
        "variants",
        "overall",
        "improvements",
        "by_context",
        "by_position",
        "lossless",
        "speed",
        "measured",
        "samples",
    )
    for part in same:
        assert found[part] == wanted[part], part
    assert {row["stage"] for row in found["against_baselines"]["base"]} == {"long"}
    assert {row["stage"] for row in wanted["against_baselines"]["base"]} == {"longcot"}


def test_the_gates_judge_the_published_draft_and_every_stage(folder: Path) -> None:
    rows = read_json(folder / "report.json")["gates"]["base"]
    assert {row["what"].split(",")[0] for row in rows if row["gate"] == "context"} == {"long"}
    assert "longcot after long" in {row["what"].split(",")[0] for row in rows if row["gate"] == "forgetting"}


def test_chains_are_chosen_by_the_published_stage(folder: Path) -> None:
    rows = list(jsonl.read(folder / "results/base/evaluation/long.jsonl"))
    kept = [count for row in rows if row["record"] not in OF_TASK[row["task"]] for count in row["accepted"]]
    (stored,) = read_acceptance(folder / "results/base/final_draft")
    assert vars(stored)["positions"][0] == (sum(count > 0 for count in kept), len(kept))


def test_the_page_tells_which_stage_why_and_what_is_left_out(folder: Path) -> None:
    parser, _, text = read_page(folder)
    assert (parser.faults, parser.open) == ([], [])
    assert "base, final draft (after long)" in text
    assert "long: the best. Against the last stage, longcot, on the same prompts: +0.100 (+0.020 to +0.180)." in text
    rows = parser.rows("Stage", "acceptance")
    assert rows[1] == ["long", "2.60 2.25 – 2.75", "12", "6", "yes"]
    assert [row[-1] for row in rows] == ["no", "yes", "no"]
    assert "have chosen which stage is published: short: 4 prompts; long: 2 prompts; cot: 6 prompts." in text
    assert "Fewer prompts than asked for" not in text
    assert ["final.records.puzzles", "3, 4, 9"] in [row for table in parser.tables for row in table]


def test_what_has_chosen_for_one_of_two_runs_is_told_of_neither(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "final_draft").mkdir(parents=True)
    write_json(tmp_path / "a/final_draft/provenance.json", {"final": {"records": {"x": [1, 2]}}})
    write_json(tmp_path / "b/final_draft/provenance.json", {"final": {"records": {"x": [2, 3], "y": [0]}}})
    write_json(tmp_path / "c/final_draft/provenance.json", {"order": []})
    assert records_that_chose(tmp_path / name for name in "abc") == {"x": {1, 2, 3}, "y": {0}}
