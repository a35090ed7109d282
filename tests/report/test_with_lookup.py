"""A report of a run whose published draft was measured with prompt lookup beside it too."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.chain_length import ChainAcceptance, read_acceptance
from tests.report.synthetic_run import SETTINGS, evaluation_rows, sample, write_run
from tests.report.test_numbers import report
from tests.report.test_page import read_page

WITH_LOOKUP = "with-lookup"


def measured_too(folder: Path, arguments: list[str], more: int) -> list[str]:
    """The command line after such a measurement, of so many more kept tokens in each round than the last stage's."""
    folder /= "results/base/evaluation"
    rows: list[dict[str, Any]] = []
    for row in evaluation_rows("longcot", SETTINGS, 1):
        accepted = [kept + more for kept in row["accepted"]]
        new = sum(accepted) + len(accepted)
        if "sample" in row:
            row["sample"] = sample(accepted)
        row |= {"drafter": WITH_LOOKUP, "accepted": accepted, "new_tokens": new, "acceptance_length": new / len(accepted)}
        rows.append(row)
    jsonl.write(folder / f"{WITH_LOOKUP}.jsonl", rows)
    place = arguments.index("--settings") + 1
    return [*arguments[:place], json.dumps(SETTINGS | {"with_lookup": 8}), *arguments[place + 1 :]]


def test_its_gain_over_the_draft_alone_is_told(tmp_path: Path) -> None:
    arguments = write_run(tmp_path, {"base": 0.0})
    alone = report(arguments)
    assert alone["with_lookup"] == {"base": None}
    assert "prompt lookup beside it" not in read_page(tmp_path)[2]
    found = report(measured_too(tmp_path, arguments, 1))
    mean = {name: each["mean"] for name, each in found["overall"]["base"].items()}
    assert mean[WITH_LOOKUP] == pytest.approx(mean["longcot"] + 1)
    assert found["with_lookup"]["base"]["difference"] == pytest.approx(1)
    assert found["with_lookup"]["base"]["improved"] is True
    assert found["against_baselines"] == alone["against_baselines"], "it is no baseline"
    speed = found["speed"]["base"][WITH_LOOKUP]["speed_up"]["mean"]
    told = (
        f"With up to 8 tokens of prompt lookup beside it the final draft brings {mean[WITH_LOOKUP]:.2f} tokens a round: +1.00"
    )
    text = read_page(tmp_path)[2]
    assert told in text
    assert f", {speed:.2f} times plain decoding." in text
    assert "draft and lookup" in text
    (chain, beside) = read_acceptance(tmp_path / "results/base/final_draft")
    assert isinstance(chain, ChainAcceptance)
    assert (beside.levels, beside.copied) == ((1, 1, 1, 1), 8)
    assert beside.expected_tokens == pytest.approx(mean[WITH_LOOKUP])
    assert f"draft token {SETTINGS['shapes'][0] + 1} or later, kept" in text


def test_a_measurement_that_the_settings_ask_for_is_missed(tmp_path: Path) -> None:
    arguments = measured_too(tmp_path, write_run(tmp_path, {"base": 0.0}), 0)
    (tmp_path / f"results/base/evaluation/{WITH_LOOKUP}.jsonl").unlink()
    with pytest.raises(ValueError, match=r"with-lookup\.jsonl: missing; the workflow makes it \(rule evaluate\)"):
        report(arguments)
