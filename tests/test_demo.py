"""The demo's bars, on the report that `make demo` left; without one these tests skip themselves."""

import json
from pathlib import Path
from typing import Any

import pytest

VARIANT = "sinkpi-slicing"


@pytest.fixture(scope="module")
def numbers(root: Path) -> dict[str, Any]:
    path = root / "results/demo/report.json"
    if not path.exists():
        pytest.skip("results/demo/report.json is not there: run `make demo` first")
    return json.loads(path.read_text())


def test_acceptance_is_above_the_bar_and_both_baselines(numbers: dict[str, Any]) -> None:
    overall = numbers["overall"][VARIANT]
    assert overall["longcot"]["low"] >= 1.6
    assert {entry["before"] for entry in numbers["against_baselines"][VARIANT]} == {"untrained", "lookup"}
    assert all(entry["low"] > 0 for entry in numbers["against_baselines"][VARIANT])


def test_each_stage_improves_on_its_own_kind_of_data(numbers: dict[str, Any]) -> None:
    steps = numbers["improvements"][VARIANT]
    assert [(entry["stage"], entry["before"]) for entry in steps] == [
        ("base", "untrained"),
        ("long", "base"),
        ("longcot", "long"),
    ]
    assert all(entry["low"] > 0 for entry in steps)


def test_output_is_the_targets_own(numbers: dict[str, Any]) -> None:
    lossless = numbers["lossless"][VARIANT]
    assert lossless["unexplained"] == 0
    assert lossless["tokens_compared"] >= 10_000
