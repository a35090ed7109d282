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


def test_the_curve_is_in_nats_a_token_or_stands_alone() -> None:
    """A draft that knows nothing of 1,024 tokens: ln 1,024 nats in each of three steps, weighted 1, 0.5 and 0.25."""
    nothing = math.log(1024)
    metrics = [{"step": 1, "loss": 1.75 * nothing, "llm_loss": 2.5}, {"step": 2, "loss": math.nan, "llm_loss": 2.5}]
    stage = Stage("base", changed("demo-eagle3", "ttt", steps=3, decay=0.5), metrics)
    assert [list(each_T) for each_T in curves(stage)] == [[1.0], [pytest.approx(nothing)], [2.5]]
    assert loss_unit(stage) == "loss, nats per token"
    stage = Stage("base", changed("demo-dflash", "blocks", weights="d_pace"), [{"step": 1, "loss": 4.0, "llm_loss": 2.5}])
    _, loss_T, target_T = curves(stage)
    assert (loss_T.tolist(), np.isnan(target_T).tolist()) == ([4.0], [True])
    assert loss_unit(stage) == "weighted loss"
