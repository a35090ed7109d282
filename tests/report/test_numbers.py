"""report.json against figures worked out by hand on a tiny run, and the acceptance that is left beside its final draft."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json, write_json
from longspec.chain_length import FILE, ChainAcceptance, TreeAcceptance, read_acceptance
from longspec.measure.tasks import Setting
from longspec.report.__main__ import make_report, parse_arguments
from longspec.report.acceptance_file import longest_chains
from tests.refusals import refused
from tests.report.synthetic_run import SETTINGS, line, positions, write_run

pytestmark = pytest.mark.usefixtures("undrawn")
TINY = SETTINGS | {"prompts": 5, "shapes": [2], "tasks": {"short": {"data": "stdlib", "context": [1, 9]}}}
# Accepted drafted tokens per round, prompt by prompt; a round yields one more token than it accepts.
ACCEPTED = {
    "untrained": [[0, 0], [0], [0], [0], [0, 0, 0]],
    "lookup": [[1, 0], [0], [0], [0], [0, 0, 0]],
    "base": [[1, 1], [1], [1], [1], [1, 1, 1]],
    "long": [[1, 1], [1], [1], [1], [1, 0, 1]],
    "longcot": [[2, 2], [2], [0], [1], [2, 1, 1]],
}
CONTEXT = [10, 255, 256, 700, 511]


def write_tiny(folder: Path, **changes: Any) -> list[str]:
    """The tiny run's files; `changes` replace fields of every line. Returns the report's command line."""
    arguments = write_run(folder, {"base": 0.0}, TINY)
    for drafter, prompts in ACCEPTED.items():
        rows = []
        for prompt, accepted in enumerate(prompts * 2):  # ten records: with fewer than eight there is no interval
            more = {"context_tokens": CONTEXT[prompt % 5], "margin": 0.01 * (prompt % 5), "margin_allowed": 0.08}
            more |= {"tokens_compared": 10, "mismatches": 1, "near_ties": 1}
            more |= {"seconds_plain": 3.0, "seconds_speculative": 2.0, "seconds_target": 1.0}
            rows.append(line(drafter, "short", prompt, accepted, 2) | more | changes)
        jsonl.write(folder / "results" / "base" / "evaluation" / f"{drafter}.jsonl", reversed(rows))
    return arguments


def report(arguments: list[str]) -> dict[str, Any]:
    """Make the report and read its numbers."""
    options = parse_arguments(arguments)
    make_report(options)
    return json.loads(options.out.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tiny run's numbers."""
    return report(write_tiny(tmp_path_factory.mktemp("tiny")))


def test_buckets_losslessness_and_speed(numbers: dict[str, Any]) -> None:
    row = numbers["variants"]["base"]["longcot"]["short"]
    assert (row["mean"], row["prompts"], row["tokens"], row["documents"]) == (19 / 8, 10, 38, 10)
    assert 1.0 <= row["low"] < 19 / 8 < row["high"] <= 3.0
    buckets = {(b["from"], b["to"]): b for b in numbers["by_context"]["base"]["longcot"]}
    assert {edges: b["prompts"] for edges, b in buckets.items()} == {(0, 256): 4, (256, 512): 4, (512, 1024): 2}
    assert buckets[0, 256]["mean"] == 9 / 3
    assert buckets[256, 512]["mean"] == 8 / 4
    assert buckets[256, 512]["low"] is None  # four records carry no interval
    lossless = numbers["lossless"]["base"]
    assert (lossless["tokens_compared"], lossless["mismatches"], lossless["unexplained"]) == (500, 50, 0)
    assert lossless["largest_margin"] == 0.5  # of prompts 4 and 9: 0.04 of 0.08
    speed = numbers["speed"]["base"]["longcot"]
    assert speed["speed_up"] == {"mean": 1.5, "low": 1.5, "high": 1.5, "documents": 10}
    assert (speed["draft_share"], speed["target_share"], speed["other_share"]) == (0.25, 0.5, 0.25)
    # Twice: 2.5 s for 8 rounds of 2 drafted tokens and 5 s for their verifications, 15 s for 19 plain tokens.
    assert speed["measured_cost_ratio"] == pytest.approx((2.5 / 16) / (15 / 19))
    assert speed["verification_cost_ratio"] == pytest.approx((5 / 8) / (15 / 19))


@pytest.mark.parametrize(("records", "known"), [([*range(8), 7, 7], True), ([*range(7), 6, 6, 6], False)])
def test_fewer_than_eight_records_carry_no_interval(tmp_path: Path, records: list[int], known: bool) -> None:
    arguments = write_tiny(tmp_path)
    for path in (tmp_path / "results" / "base" / "evaluation").iterdir():
        jsonl.write(path, [row | {"record": records[row["prompt"]]} for row in list(jsonl.read(path))])
    numbers = report(arguments)
    found = numbers["variants"]["base"]["longcot"]["short"]
    assert (found["mean"], found["documents"]) == (19 / 8, len(set(records)))
    first = numbers["improvements"]["base"][0]
    assert (first["difference"], first["improved"]) == (1.0, True if known else None)
    ends = [found["low"], first["low"], numbers["speed"]["base"]["longcot"]["speed_up"]["low"]]
    assert [end is not None for end in ends] == [known] * 3
    page = (tmp_path / "report.html").read_text()
    assert ("too few records to judge" in page) != known


def test_a_prompt_answered_by_its_first_token_alone_changes_no_figure(tmp_path: Path, numbers: dict[str, Any]) -> None:
    """It has no round, so it is no record that an interval rests on."""
    arguments, before, answered = write_tiny(tmp_path), numbers, 40
    for path in (tmp_path / "results" / "base" / "evaluation").iterdir():
        rows = list(jsonl.read(path))
        empty = {"accepted": [], "rounds": 0, "new_tokens": 0, "positions": positions([], 2), "seconds_plain": 0.0}
        rows += [rows[0] | empty | {"prompt": 10 + number, "record": 10 + number} for number in range(answered)]
        jsonl.write(path, rows)
    after = report(arguments)
    for drafter, found in after["variants"]["base"].items():
        assert found["short"] == before["variants"]["base"][drafter]["short"] | {"prompts": 10 + answered}
    for key in ("improvements", "against_baselines"):
        assert after[key] == before[key]


def test_a_line_of_other_settings_is_named(tmp_path: Path) -> None:
    with refused(f"{tmp_path}/results/base/evaluation/untrained.jsonl: line 1:"):
        report(write_tiny(tmp_path, temperature=0.5))


def test_unpaired_prompts_are_refused(tmp_path: Path) -> None:
    arguments = write_tiny(tmp_path)
    path = tmp_path / "results" / "base" / "evaluation" / "long.jsonl"
    jsonl.write(path, [row for row in list(jsonl.read(path)) if row["prompt"] != 3])
    with refused(f"{path}: task short, prompt 4:", path.with_name("untrained.jsonl")):
        report(arguments)


def test_stages_stand_in_the_order_of_the_provenance(tmp_path: Path) -> None:
    """It decides, not the names: longcot trained before long here."""
    arguments = write_tiny(tmp_path)
    path = tmp_path / "results/base/final_draft/provenance.json"
    write_json(path, read_json(path) | {"order": ["base", "longcot", "long"]})
    assert [row["stage"] for row in report(arguments)["improvements"]["base"]] == ["base", "longcot", "long"]


def test_the_final_draft_keeps_its_acceptance(tmp_path: Path) -> None:
    """The tiny run's final draft keeps [2, 2], [2], [0], [1], [2, 1, 1] of two: 7 of 8 first tokens, then 4 of 7, twice.

    Prompt lookup brings 9 tokens in 8 rounds, twice.
    """
    arguments = write_tiny(tmp_path)
    numbers = report(arguments)
    held = (ChainAcceptance(0.0, ((14, 16), (8, 14))), TreeAcceptance(0.0, (), 18, 16, copied=2))
    assert read_acceptance(tmp_path / "results/base/final_draft") == held
    (tmp_path / "results/base/evaluation").rename(tmp_path / "results/base/bench")
    (tmp_path / "results/base/final_draft" / FILE).unlink()
    assert report([*arguments, "--evaluations", "bench"])["overall"] == numbers["overall"]
    assert not (tmp_path / "results/base/final_draft" / FILE).exists()  # measured apart, it chooses no chains


def test_the_longest_chain_of_each_temperature_tells_of_all_shorter_ones() -> None:
    settings = [Setting(0.7, 3), Setting(0.0, 2), Setting(0.0, (2, 4)), Setting(0.0, 5), Setting(1.0, (2, 4))]
    assert longest_chains(settings) == [Setting(0.0, 5), Setting(0.7, 3)]
