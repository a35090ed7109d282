"""A report of two runs, which is what `snakemake compare` makes: differences paired by prompt, and what it must not write.

The first card of its page answers which is better.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json, write_json
from longspec.draft_vocabulary import DraftVocabulary
from longspec.report.answer import verdict
from tests.refusals import refused
from tests.report.synthetic_run import make_eagle3, positions
from tests.report.test_numbers import report, write_tiny
from tests.report.test_page import read_page

pytestmark = pytest.mark.usefixtures("undrawn")
# Drafted tokens kept in each round of the second run's final draft: twice 11 rounds, 8 kept, 19 tokens as in the first run.
KEPT = 2 * [[1, 1, 0], [1, 0], [0], [1, 0], [2, 1, 1]]


def write_runs(folder: Path) -> list[str]:
    """Runs a and b of the variant base; b's final draft keeps KEPT. The report's command line."""
    for name in ("a", "b"):
        arguments = write_tiny(folder)
        (folder / "results").rename(folder / name)
    path = folder / "b/base/evaluation/longcot.jsonl"
    rows = []
    for row, kept in zip(sorted(jsonl.read(path), key=lambda row: row["prompt"]), KEPT, strict=True):
        rows.append(row | {"accepted": kept, "rounds": len(kept), "positions": positions(kept, 2)})
        rows[-1] |= {"new_tokens": sum(kept) + len(kept), "seconds_speculative": 4.0}
    jsonl.write(path, rows)
    place = arguments.index("--variant")
    runs = [option for name in ("a", "b") for option in ("--variant", f"{name}/base={folder / name / 'base'}")]
    return [*arguments[:place], *runs, *arguments[place + 2 :]]


def by_drafter(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The differences over all tasks."""
    return {row["drafter"]: row for row in numbers["between_variants"] if row["task"] is None}


def test_the_difference_is_paired_and_the_first_card_is_the_answer(tmp_path: Path) -> None:
    """Run b keeps 19 tokens in 11 rounds, run a in 8; a is 3 / 2 times as fast as plain decoding, b 3 / 4 times."""
    arguments = write_runs(tmp_path)
    for stage in ("base", "long"):
        recipe = tmp_path / f"b/base/{stage}/recipe.yaml"
        recipe.write_text(recipe.read_text().replace("window: 512", "window: 256"))
    told = read_json(tmp_path / "b/base/final_draft/provenance.json")
    told["stages"]["long"]["training_seconds"] = 61.0
    write_json(tmp_path / "b/base/final_draft/provenance.json", told | {"git_commit": "<script>1</script>"})
    numbers = report(arguments)
    # What a draft's folder tells of its acceptance is its own run's report's: another run's choice left records out here.
    assert not list(tmp_path.rglob("acceptance.json"))
    rows = by_drafter(numbers)
    assert list(rows) == ["final draft", "untrained", "base", "long", "longcot"]  # no draft changes prompt lookup
    row = rows["final draft"]
    assert (row["variant"], row["before"]) == ("b/base", "a/base")
    assert row["difference"] == pytest.approx(19 / 11 - 19 / 8)
    # Prompt by prompt b loses 6/2 - 5/3, 3 - 3/2, 0, 2 - 3/2, 7/3 - 7/3 tokens a round.
    assert -1.5 <= row["low"] < row["difference"] < row["high"] <= 0.0
    assert [rows["long"][key] for key in ("difference", "low", "high")] == [0.0, 0.0, 0.0]
    assert {run: numbers["speed"][f"{run}/base"]["longcot"]["speed_up"]["mean"] for run in "ab"} == {"a": 1.5, "b": 0.75}
    (row,) = numbers["answers"]
    found, speed = row["acceptance"], row["speed_up"]
    assert (row["variant"], row["before"], row["tasks"]) == ("b/base", "a/base", {"short": found})
    assert (found["verdict"], found["better"], found["worse"]) == ("no", "a/base", "b/base")
    assert found["by"] == pytest.approx(19 / 8 - 19 / 11)
    assert 0 < found["low"] < found["by"] < found["high"] < 1.5
    assert (speed["better"], speed["verdict"]) == ("a/base", "no")
    assert [speed[key] for key in ("by", "low", "high")] == pytest.approx([0.75] * 3)
    assert row["differs"] == [
        {"key": "draft.window", "old": 512, "new": 256, "stages": ["base", "long"]},
        {"key": "git_commit", "old": "0f" * 20, "new": "<script>1</script>", "stages": []},
    ]
    parser, source, text = read_page(tmp_path)
    assert "b/base a/base final draft all −0.648" in text
    cards = [attributes.get("class") for tag, attributes in parser.elements if tag == "section"]
    assert cards == ["card answer", "card", "card"]
    card = text[text.index("b/base against a/base") : text.index("a/base, final draft (after longcot)")]
    assert "a/base is better, +0.648 tokens a round" in card
    assert "(b/base 1.73, a/base 2.38)" in card
    assert "a/base is faster, +0.750 (+0.750 to +0.750) (b/base 0.75×, a/base 1.50×)" in card
    assert "draft.window 512 → 256 (base, long)" in card
    assert 'class="no"' not in source[source.index("card answer") : source.index('<section class="card">')]


def test_speeds_of_other_devices_are_not_judged(tmp_path: Path) -> None:
    """Nor is a difference silent that is in no recipe: the tokens that GLIDE proposes while it decodes."""
    arguments, vocabulary = write_runs(tmp_path), tmp_path / "b/base/draft_vocabulary_4.json"
    DraftVocabulary((1, 2, 5, 6), 1024, "t", {"all": 1.0}).write(vocabulary)
    for run, device, threads in (("a", "AMD EPYC", 2), ("b", "NVIDIA H200", 1)):
        held = {"identity": {"device": device, "threads": threads, "seed": 0}}
        (tmp_path / f"{run}/base/evaluation/.longcot.measured.jsonl").write_text(json.dumps(held) + "\n")
    (row,) = report([*arguments, "--vocabulary", str(vocabulary)])["answers"]
    assert (row["speed_up"]["verdict"], row["speed_up"]["better"]) == ("measured on other devices or threads", None)
    assert row["speed_up"]["by"] == pytest.approx(-0.75)
    other_device = {"key": "device", "old": "AMD EPYC", "new": "NVIDIA H200", "stages": []}
    fewer_tokens = {"key": "draft vocabulary", "old": None, "new": 4, "stages": []}
    assert row["differs"] == [other_device, fewer_tokens, {"key": "threads", "old": 2, "new": 1, "stages": []}]
    assert "Measured speed-up: measured on other devices or threads, −0.750" in read_page(tmp_path)[2]


def test_each_variant_is_held_against_the_other_runs_of_its_name_or_the_first(tmp_path: Path) -> None:
    arguments = write_runs(tmp_path)
    (tmp_path / "b/base").rename(tmp_path / "b/ttt")
    make_eagle3(tmp_path / "b/ttt", {"all": 1.0})
    place = arguments.index(f"b/base={tmp_path / 'b/base'}")
    arguments[place : place + 1] = [f"b/ttt={tmp_path / 'b/ttt'}", "--variant", f"c/ttt={tmp_path / 'b/ttt'}"]
    numbers = report(arguments)
    pairs = {(row["before"], row["variant"]) for row in numbers["between_variants"]}
    assert pairs == {("a/base", "b/ttt"), ("b/ttt", "c/ttt")}
    assert numbers["answers"][0]["differs"][0] == {"key": "method", "old": "glide", "new": "eagle3", "stages": []}


def test_runs_of_other_stages_are_compared_by_their_final_drafts(tmp_path: Path) -> None:
    """Run b ended after stage long: 15 tokens in 8 rounds."""
    arguments = write_runs(tmp_path)
    provenance = read_json(tmp_path / "b/base/final_draft/provenance.json")
    provenance["order"].remove("longcot")
    write_json(tmp_path / "b/base/final_draft/provenance.json", provenance)
    numbers = report(arguments)
    rows = by_drafter(numbers)
    assert list(rows) == ["final draft", "untrained", "base", "long"]
    assert rows["final draft"]["difference"] == pytest.approx(15 / 8 - 19 / 8)
    assert [row["key"] for row in numbers["answers"][0]["differs"]] == ["order"]


def test_what_has_chosen_one_runs_stage_is_left_out_of_both(tmp_path: Path) -> None:
    """Run a published its stage long, chosen by records 1 and 2 of each five: of longcot's 19 tokens 15 are left."""
    arguments = write_runs(tmp_path)
    path = tmp_path / "a/base/final_draft/provenance.json"
    write_json(path, read_json(path) | {"final": {"stage": "long", "records": {"stdlib": [1, 2, 6, 7], "puzzles": [0]}}})
    numbers = report(arguments)
    found = [numbers["overall"][name]["longcot"] for name in ("a/base", "b/base")]
    assert [each["mean"] for each in found] == [15 / 6, 15 / 8]
    assert [each["prompts"] for each in found] == [6, 6]
    assert by_drafter(numbers)["final draft"]["difference"] == pytest.approx(
        15 / 8 - numbers["overall"]["a/base"]["long"]["mean"]
    )
    chosen = {"stage": "long", "records": {"stdlib": [*range(10)], "puzzles": [0]}}
    write_json(path, read_json(path) | {"final": chosen})
    with refused(tmp_path / "a/base/evaluation/untrained.jsonl", "task", 10, "final: last"):
        report(arguments)


@pytest.mark.parametrize(
    ("difference", "low", "high", "told"),
    [
        (0.2, 0.1, 0.3, "yes"),
        (-0.2, -0.3, -0.1, "no"),
        (0.0, 0.0, 0.0, "the same"),
        (0.1, -0.1, 0.3, "undecided"),
        (0.1, 0.0, 0.2, "undecided"),  # an end at 0 is not above it
        (0.2, None, None, "too few records"),
        (None, None, None, "not measured"),
    ],
)
def test_a_verdict_is_of_the_whole_interval(difference: float | None, low: float | None, high: float | None, told: str) -> None:
    assert verdict({"difference": difference, "low": low, "high": high}) == told


def test_equal_drafts_are_no_red_no(tmp_path: Path) -> None:
    """Run b has the lines of run a."""
    arguments = write_runs(tmp_path)
    theirs, own = (tmp_path / f"{run}/base/evaluation/longcot.jsonl" for run in "ab")
    own.write_bytes(theirs.read_bytes())
    (row,) = report(arguments)["answers"]
    assert (row["acceptance"]["verdict"], row["speed_up"]["verdict"], row["differs"]) == ("the same", "the same", [])
    parser, source, text = read_page(tmp_path)
    assert "No difference" in text
    assert "nothing in recipes and provenance" in text
    assert {cells[-1] for cells in parser.rows("Variant", "against", "drafter")} == {"the same"}
    assert "+0.000" not in text
    assert '<span class="bad">no</span>' not in source
