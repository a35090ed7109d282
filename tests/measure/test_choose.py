"""Which stage is published: the records that choose it, the figures, and what they decide."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json
from longspec.measure.choose import main as choose
from tests.corpus import write_raw
from tests.refusals import refused
from tests.report.synthetic_run import SETTINGS, STAGES, evaluation_rows

RECORDS = 24  # of each task, two prompts from each
DATA = {task: settings["data"] for task, settings in SETTINGS["tasks"].items()}


def text_of(task: str, record: int) -> str:
    """Tasks short and long share the texts of their even records, each in an order of its own."""
    shared = record % 2 == 0 and task in ("short", "long")
    return f"both {record if task == 'short' else RECORDS - 2 - record}" if shared else f"{task} {record}"


def write_records(folder: Path) -> list[str]:
    """Held-out records of all three datasets in three formats; the verb's option that names them."""
    made: dict[str, list[dict[str, Any]]] = {}
    for task, data in DATA.items():
        texts = [text_of(task, record) for record in range(RECORDS)]
        formats = {"short": {"path": "a.py"}, "long": {"source": "code", "path": "b.py"}}
        made[data] = [{"text": text, **formats[task]} if task in formats else {"problem": text, "qwq": "so"} for text in texts]
        write_raw(folder / data, [], made[data])
    return ["--raw", *(f"{data}={folder / data / 'manifest.json'}" for data in made)]


def chosen(folder: Path, settings: dict[str, Any] = SETTINGS, **changed: list[dict[str, Any]]) -> dict[str, Any]:
    """Write records and measurements, where changed ones take the place of a stage's, and choose."""
    raw = write_records(folder)
    paths = [folder / f"{stage}.jsonl" for stage in STAGES]
    for stage, path in zip(STAGES, paths, strict=True):
        jsonl.write(path, changed.get(stage, evaluation_rows(stage, settings, 1)))
    named = ["--settings", json.dumps(settings), *raw, "--evaluations", *map(str, paths), "--out", str(folder / "out.json")]
    choose(named)
    return read_json(folder / "out.json")


def with_kept(stage: str, kept: int) -> list[dict[str, Any]]:
    """Measurements in which every round keeps as many drafted tokens: `kept` + 1 tokens a round."""
    rows = []
    for row in evaluation_rows(stage, SETTINGS, 1):
        rounds = row["rounds"]
        positions = [[rounds if place <= kept else 0, rounds if place <= kept + 1 else 0] for place in range(1, 5)]
        rows.append(row | {"accepted": [kept] * rounds, "new_tokens": (kept + 1) * rounds, "positions": positions})
    return rows


def test_no_text_both_chooses_and_is_told(tmp_path: Path) -> None:
    """The records are a function of seed and texts."""
    records = chosen(tmp_path)["records"]
    assert chosen(tmp_path / "b", longcot=with_kept("longcot", 0))["records"] == records
    assert chosen(tmp_path / "c", SETTINGS | {"seed": 1})["records"] != records
    chosen_texts = {text_of(task, record) for task, data in DATA.items() for record in records[data]}
    told = {text_of(task, record) for task, data in DATA.items() for record in range(RECORDS) if record not in records[data]}
    assert not chosen_texts & told
    assert len(records["puzzles"]) == RECORDS // 4  # it shares no text
    for data in ("stdlib", "stdlib-long"):
        assert RECORDS // 4 <= len(records[data]) <= RECORDS // 2
    assert all(0 not in lines for lines in records.values())  # of each task's first prompt, whose text the page shows
    assert RECORDS - 2 not in records["stdlib"]  # the text of the first prompt of long


def test_figures_are_of_the_chosen_prompts_and_the_surely_better_wins(tmp_path: Path) -> None:
    found = chosen(tmp_path, base=with_kept("base", 3), long=with_kept("long", 1))
    for stage, mean in (("base", 4.0), ("long", 2.0)):
        figure = found["figures"][stage]
        assert (figure["mean"], figure["low"], figure["high"]) == (mean, mean, mean)
    rows = [row for row in jsonl.read(tmp_path / "longcot.jsonl") if row["record"] in found["records"][DATA[row["task"]]]]
    figure = found["figures"]["longcot"]
    assert figure["mean"] == pytest.approx(sum(row["new_tokens"] for row in rows) / sum(row["rounds"] for row in rows))
    assert figure["low"] < figure["mean"] < figure["high"]
    assert (figure["prompts"], figure["documents"]) == (len(rows), len(rows) // 2)
    assert sum(found["prompts"].values()) == len(rows)
    assert found["stage"] == "base"
    assert found["against_last"]["difference"] == pytest.approx(4.0 - figure["mean"])


def test_of_equal_stages_that_are_surely_better_the_later_is_published(tmp_path: Path) -> None:
    found = chosen(tmp_path, base=with_kept("base", 3), long=with_kept("long", 3), longcot=with_kept("longcot", 1))
    assert (found["stage"], found["against_last"]["low"]) == ("long", 2.0)
    assert found["why"].startswith("better than the last stage, longcot")


def test_a_lead_by_chance_publishes_no_earlier_stage(tmp_path: Path) -> None:
    """The second stage leads by the mean, on all but one record, where it loses much: its interval spans zero."""
    apart = chosen(tmp_path)["records"]
    lost = apart["puzzles"][0]
    ahead = [
        row | {"accepted": [count] * row["rounds"], "new_tokens": (count + 1) * row["rounds"]}
        for row in with_kept("long", 1)
        for count in [0 if (row["task"], row["record"]) == ("cot", lost) else 1 + (row["record"] % 8 == 0)]
    ]
    found = chosen(tmp_path, long=ahead, longcot=with_kept("longcot", 1), base=with_kept("base", 0))
    assert found["figures"]["long"]["mean"] > found["figures"]["longcot"]["mean"]
    assert (found["stage"], found["against_last"]) == ("longcot", None)
    assert re.fullmatch(
        r"the last stage: no earlier one is surely better \(long less longcot: \+0\.\d\d, 95 % interval -.*\)", found["why"]
    )


def test_too_few_records_choose_nothing_and_are_told(tmp_path: Path) -> None:
    """The last stage is published, though another is better; as the message says, more prompts let it be chosen."""
    better = with_kept("base", 4)
    few = [
        [row for row in rows if row["prompt"] < 8] for rows in (better, *(evaluation_rows(s, SETTINGS, 1) for s in STAGES[1:]))
    ]
    found = chosen(tmp_path / "few", **dict(zip(STAGES, few, strict=True)))  # four records of each task
    assert (found["stage"], found["figures"], found["records"]) == ("longcot", {}, {})
    assert re.search(r"fewer than 8 records of short, long, cot .* raise evaluation\.prompts", found["why"])
    assert chosen(tmp_path / "enough", base=better)["stage"] == "base"


def test_stages_that_had_no_round_choose_nothing(tmp_path: Path) -> None:
    """Sampled texts may end with their first token: of the chosen prompts that leaves no figure."""
    apart = chosen(tmp_path)["records"]
    rows = [
        row | ({"accepted": [], "rounds": 0, "new_tokens": 0} if row["record"] in apart[DATA[row["task"]]] else {})
        for row in evaluation_rows("long", SETTINGS, 1)
    ]
    found = chosen(tmp_path, long=rows)
    assert (found["stage"], found["records"]) == ("longcot", {})


def test_measurements_of_other_prompts_are_refused(tmp_path: Path) -> None:
    raw = write_records(tmp_path)
    for stage in STAGES:
        jsonl.write(tmp_path / f"{stage}.jsonl", evaluation_rows(stage, SETTINGS, 1))
    named = ["--settings", json.dumps(SETTINGS), "--out", str(tmp_path / "out.json"), "--evaluations"]
    named += [str(tmp_path / f"{stage}.jsonl") for stage in STAGES]
    with refused("--raw", "puzzles", "evaluation.tasks.cot.data", kind=SystemExit):
        choose([*named, *raw[:-1]])
    jsonl.write(tmp_path / "long.jsonl", [row | {"prompt_hash": "x"} for row in evaluation_rows("long", SETTINGS, 1)])
    with refused(f"{tmp_path}/long.jsonl: task short, prompt 0", tmp_path / "base.jsonl", kind=SystemExit):
        choose([*named, *raw])
    assert not (tmp_path / "out.json").exists()
