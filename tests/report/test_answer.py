"""The first card of a page about two variants answers which is better; the loss is shown in nats a token."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec import methods
from longspec.config import compose
from longspec.report.answer import verdict
from longspec.report.inputs import Stage
from longspec.report.plots import curves, loss_unit
from tests.report.test_numbers import report
from tests.report.test_page import read_page
from tests.report.test_two_runs import write_runs


def between(difference: float | None, low: float | None, high: float | None) -> dict[str, Any]:
    """Make a paired difference."""
    return {"difference": difference, "low": low, "high": high}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (between(0.2, 0.1, 0.3), "yes"),
        (between(-0.2, -0.3, -0.1), "no"),
        (between(0.0, 0.0, 0.0), "the same"),
        (between(0.1, -0.1, 0.3), "undecided"),
        (between(0.1, 0.0, 0.2), "undecided"),  # an end at 0 is not above it
        (between(0.2, None, None), "too few records"),
        (between(None, None, None), "not measured"),
    ],
)
def test_a_verdict_is_of_the_whole_interval(found: dict[str, Any], told: str) -> None:
    assert verdict(found) == told


@pytest.mark.usefixtures("undrawn")
def test_the_first_card_is_the_answer(tmp_path: Path) -> None:
    """Run b keeps 19 tokens in 11 rounds, run a in 8; a is 3 / 2 times as fast as plain decoding, b 3 / 4 times."""
    arguments = write_runs(tmp_path)
    for stage in ("base", "long"):
        recipe = tmp_path / f"b/base/{stage}/recipe.yaml"
        recipe.write_text(recipe.read_text().replace("window: 512", "window: 256"))
    (row,) = report(arguments)["answers"]
    assert (row["variant"], row["before"]) == ("b/base", "a/base")
    found, speed = row["acceptance"], row["speed_up"]
    assert (found["better"], found["worse"]) == ("a/base", "b/base")
    assert found["by"] == pytest.approx(19 / 8 - 19 / 11)
    assert 0 < found["low"] < found["by"] < found["high"] < 1.5
    assert row["tasks"] == {"short": found}
    assert (speed["better"], speed["verdict"]) == ("a/base", "no")
    assert [speed[key] for key in ("by", "low", "high")] == pytest.approx([0.75] * 3)
    assert row["differs"] == [{"key": "draft.window", "old": 512, "new": 256, "stages": ["base", "long"]}]
    parser, source, text = read_page(tmp_path)
    cards = [attributes.get("class") for tag, attributes in parser.elements if tag == "section"]
    assert cards == ["card answer", "card", "card"]
    card = text[text.index("b/base against a/base") : text.index("a/base, final draft (after longcot)")]
    assert "a/base is better, +0.648 tokens a round" in card
    assert "(b/base 1.73, a/base 2.38)" in card
    assert "a/base is faster, +0.750 (+0.750 to +0.750) (b/base 0.75×, a/base 1.50×)" in card
    assert "draft.window 512 → 256 (base, long)" in card
    assert 'class="no"' not in source[source.index("card answer") : source.index('<section class="card">')]


@pytest.mark.usefixtures("undrawn")
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


def changed(run: str, variant: str, **draft: Any) -> Any:
    """Return the recipe of a run's first stage with changes of recipe.draft."""
    values = [f"recipe.draft.{key}={value}" for key, value in draft.items()]
    return compose("train", [f"run={run}", f"variant={variant}", "stage=base", *values]).recipe


@pytest.mark.parametrize(
    ("recipe", "weight"),
    [
        (("demo", "base", {"loss": "soft"}), 1.0),
        (("demo", "base", {"loss": "hard", "temperature": 2.0}), 1.0),  # no label has that temperature
        (("demo", "base", {"loss": "mix", "temperature": 2.0}), None),
        (("demo-eagle3", "ttt", {"steps": 3, "decay": 0.5}), 1.75),
        (("demo-eagle3", "ttt", {"steps": 7, "decay": 0.8}), (1 - 0.8**7) / 0.2),
        (("demo-dflash", "blocks", {"weights": "decay"}), 1.0),
        (("demo-dflash", "blocks", {"weights": "d_pace"}), None),
    ],
)
def test_a_losss_weight_is_the_sum_of_its_steps(recipe: tuple[str, str, dict[str, Any]], weight: float | None) -> None:
    run, variant, draft = recipe
    assert methods.loss_weight(changed(run, variant, **draft)) == (None if weight is None else pytest.approx(weight))


def test_the_curve_is_in_nats_a_token_and_the_targets_is_as_it_was_written() -> None:
    """A draft that knows nothing of 1,024 tokens: ln 1,024 nats in each of three steps, weighted 1, 0.5 and 0.25."""
    nothing = math.log(1024)
    metrics = [{"step": 1, "loss": 1.75 * nothing, "llm_loss": 2.5}, {"step": 2, "loss": math.nan, "llm_loss": 2.5}]
    stage = Stage("base", changed("demo-eagle3", "ttt", steps=3, decay=0.5), metrics)
    assert [list(each_T) for each_T in curves(stage)] == [[1.0], [pytest.approx(nothing)], [2.5]]
    assert loss_unit(stage) == "loss, nats per token"


def test_a_loss_that_is_not_in_nats_stands_alone() -> None:
    metrics = [{"step": 1, "loss": 4.0, "llm_loss": 2.5}]
    stage = Stage("base", changed("demo-dflash", "blocks", weights="d_pace"), metrics)
    _, loss_T, target_T = curves(stage)
    assert (loss_T.tolist(), np.isnan(target_T).tolist()) == ([4.0], [True])
    assert loss_unit(stage) == "weighted loss"
