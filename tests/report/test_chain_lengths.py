"""The line of chain lengths on the page, and the acceptance that is left beside a draft."""

from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.chain_length import FILE, ChainAcceptance, TreeAcceptance, read_acceptance
from longspec.measure.tasks import Setting, parse
from longspec.report.chain_lengths import expected_speeds, longest_chains
from longspec.report.inputs import read_variant
from tests.report.synthetic_run import SETTINGS, write_variant
from tests.report.test_numbers import report, write_tiny

pytestmark = pytest.mark.usefixtures("undrawn")
TASKS = {name: SETTINGS["tasks"][name] for name in ("short", "cot")}
TWO: dict[str, Any] = SETTINGS | {"prompts": 3, "shapes": [2], "tasks": TASKS}
POSITIONS = [[8, 10], [4, 8]]  # 1.8 tokens a round with chains of one, 2.2 with chains of two


def written(folder: Path, costs: dict[str, Any]) -> Path:
    """A variant whose final draft has these positions in every line, and costs by task in the first prompt's."""
    write_variant(folder, "base", TWO)
    path = folder / "evaluation/longcot.jsonl"
    rows = [row | {"positions": POSITIONS} for row in jsonl.read(path)]
    for row in rows:
        if row["prompt"] == 0 and row["task"] in costs:
            row["seconds_by_chain"] = costs[row["task"]]
    jsonl.write(path, rows)
    return path


def test_expected_speeds_are_those_of_the_tasks_by_their_plain_time(tmp_path: Path) -> None:
    """Chains of one and two are 2 and 2 times as fast on one task, 1 and 0.5 times on the other, whose tokens take thrice."""
    costs = {"short": {"plain": 1.0, "rounds": [0.9, 1.1]}, "cot": {"plain": 3.0, "rounds": [5.4, 13.2]}}
    rows = jsonl.read(written(tmp_path, costs))
    tokens = {"short": 0, "cot": 0}
    for row in rows:
        tokens[row["task"]] += row["new_tokens"]
    settings = parse(TWO)
    found = expected_speeds(read_variant("base", tmp_path, settings), settings)
    plain = tokens["short"] + 3 * tokens["cot"]
    by_hand = [plain / (tokens["short"] / 2 + 3 * tokens["cot"] / speed) for speed in (1.0, 0.5)]
    assert found is not None
    assert [row["speed_up"] for row in found["by_length"]] == pytest.approx(by_hand)
    assert found["best"] == 1
    written(tmp_path, {"short": costs["short"]})  # as evaluations have it that were made before costs were measured
    assert expected_speeds(read_variant("base", tmp_path, settings), settings) is None


def test_the_page_tells_them_and_the_final_draft_keeps_its_acceptance(tmp_path: Path) -> None:
    """The tiny run's final draft keeps [2, 2], [2], [0], [1], [2, 1, 1] of two: 7 of 8 first tokens, then 4 of 7, twice.

    Prompt lookup brings 9 tokens in 8 rounds, twice.
    """
    arguments = write_tiny(tmp_path, seconds_by_chain={"plain": 1.0, "rounds": [1.5, 2.375]})
    numbers = report(arguments)
    held = (ChainAcceptance(0.0, ((14, 16), (8, 14))), TreeAcceptance(0.0, (), 18, 16, copied=2))
    assert read_acceptance(tmp_path / "results/base/final_draft") == held
    assert [row["speed_up"] for row in numbers["chain_lengths"]["base"]["by_length"]] == pytest.approx([1.25, 1.0])
    page = Path(arguments[arguments.index("--out") + 1]).read_text(encoding="utf-8")
    assert "With chains of 1: 1.25×, of 2: 1.00×: expected" in page
    assert "Best here: 1;" in page
    (tmp_path / "results/base/evaluation").rename(tmp_path / "results/base/bench")
    (tmp_path / "results/base/final_draft" / FILE).unlink()
    assert report([*arguments, "--evaluations", "bench"])["overall"] == numbers["overall"]
    assert not (tmp_path / "results/base/final_draft" / FILE).exists()  # measured apart, it chooses no chains


def test_the_longest_chain_of_each_temperature_tells_of_all_shorter_ones(tmp_path: Path) -> None:
    settings = [Setting(0.7, 3), Setting(0.0, 2), Setting(0.0, (2, 4)), Setting(0.0, 5), Setting(1.0, (2, 4))]
    assert longest_chains(settings) == [Setting(0.0, 5), Setting(0.7, 3)]
