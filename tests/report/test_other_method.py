"""A run of EAGLE-3 shows its own settings, its draft vocabulary, and the labels that gave no loss."""

from pathlib import Path

import pytest

from longspec import jsonl
from longspec.report.__main__ import make_report, parse_arguments
from tests.report.synthetic_run import make_eagle3
from tests.report.test_numbers import report, write_tiny
from tests.report.test_page import read_page

pytestmark = pytest.mark.usefixtures("undrawn")
HIGH = {"base": 0.99, "long": 0.98, "longcot": 0.97, "all": 0.984}


def write_eagle3(folder: Path, coverage: dict[str, float]) -> list[str]:
    """The tiny run, trained by EAGLE-3; the report's command line."""
    arguments = write_tiny(folder)
    path = make_eagle3(folder / "results/base", coverage)
    return [*arguments, "--vocabulary", f"base={path}"]


def test_its_own_settings_and_counts(tmp_path: Path) -> None:
    numbers = report(write_eagle3(tmp_path, HIGH))
    assert numbers["vocabulary"] == {"base": {"size": 4, "of": 1024, "coverage": HIGH}}
    parser, _, text = read_page(tmp_path)
    rows = {row[0]: row[1:] for row in parser.rows("Setting", "base", "long", "longcot")}
    assert rows["layers read"] == ["0, 1, 2"] * 3
    assert rows["chain"] == [f"{steps} steps, weighted 0.8^i" for steps in (2, 3, 4)]
    assert rows["attention window, tokens"] == ["512"] * 3
    assert "lag" not in rows
    assert rows["no loss: the target prefers a token outside the draft vocabulary"] == [
        "1,400",
        "420",
        "700",
    ]  # of 200, 60, 100
    assert rows["no loss: past the document's end"] == ["600", "180", "300"]
    told = "the draft vocabulary, 4 of the target's 1,024 tokens, holds 98.4 % of the trained tokens"
    assert f"{told} (base 99.0 %, long 98.0 %, longcot 97.0 %)." in text
    assert "Low coverage" not in text


def test_a_low_coverage_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(write_eagle3(tmp_path, HIGH | {"all": 0.949}))
    _, _, text = read_page(tmp_path)
    assert "Low coverage : the draft vocabulary, 4 of" in text
    told = "WARNING base: the draft vocabulary of 4 tokens holds 94.9% of the trained tokens, less than 95%"
    assert told in capsys.readouterr().out


def test_counts_that_are_missing_and_vocabularies_of_no_variant_are_refused(tmp_path: Path) -> None:
    arguments = write_eagle3(tmp_path, HIGH)
    with pytest.raises(ValueError, match="--vocabulary: other: no such variant is reported; add --variant NAME=FOLDER"):
        make_report(parse_arguments([*arguments, "--vocabulary", "other=x.json"]))
    with pytest.raises(ValueError, match=r"x\.json: missing; the workflow makes it \(rule draft_vocabulary\)"):
        make_report(parse_arguments([*arguments, "--vocabulary", "base=x.json"]))
    path = tmp_path / "results/base/long/metrics.jsonl"
    jsonl.write(path, [{key: value for key, value in row.items() if key != "past_document"} for row in jsonl.read(path)])
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1: past_document: missing; train this stage again"):
        make_report(parse_arguments(arguments))
