"""Tables, smoothing, and the loss in nats a token, against plain expectations."""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from longspec import methods
from longspec.config import compose
from longspec.measure.tasks import parse
from longspec.report import tables
from longspec.report.inputs import Stage, Variant, read_variant
from longspec.report.plots import curves, loss_unit, smooth
from tests.report.synthetic_run import SETTINGS, write_variant


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """The demo's published variant."""
    folder = tmp_path_factory.mktemp("variant")
    write_variant(folder, "sinkpi-slicing", SETTINGS)
    return read_variant("sinkpi-slicing", folder, parse(SETTINGS), None, "evaluation", {})


def test_the_recipe_table_marks_what_changes(variant: Variant) -> None:
    table = tables.recipe_table(variant)
    rows = dict(table["settings"])
    assert table["stages"] == ["base", "long", "longcot"]
    for name, cells in rows.items():
        texts = [text for text, _ in cells]
        assert [changed for _, changed in cells] == [False, texts[0] != texts[1], texts[1] != texts[2]], name
    assert [text for text, _ in rows["data"]] == ["stdlib", "stdlib-long", "puzzles"]
    assert rows["anchor positions"][0] == ("random, up to 4", False)
    # Rows longer than draft.anchors_up_to keep plain positions, whatever the variant says.
    assert rows["anchor positions"][1] == ("plain (rows above 1,200)", True)
    assert dict(table["measured"])["optimizer steps"] == ["200", "60", "100"]


def test_smoothing_invents_nothing_at_the_ends() -> None:
    assert smooth(np.full(100, 2.5)) == pytest.approx(np.full(100, 2.5))
    line_T = np.arange(240.0)
    assert smooth(line_T)[120] == pytest.approx(120)
    assert smooth(line_T)[0] == pytest.approx(np.mean(line_T[: 240 // 24 + 1]))
    assert len(smooth(np.array([1.0]))) == 1


def test_shares_of_mixed_and_replayed_tokens_are_those_that_were_counted(variant: Variant) -> None:
    """Told from the metrics, whatever the recipe asked for; without any there is no such row."""
    assert "labels replayed" not in dict(tables.recipe_table(variant)["measured"])
    *before, last = variant.stages
    counted = [{"replayed_labels": {"base": 810, "long": 1620 * (number % 2)}} for number in range(len(last.metrics))]
    metrics = [row | each for row, each in zip(last.metrics, counted, strict=True)]
    changed = replace(variant, stages=[*before, replace(last, metrics=metrics)])
    told = dict(tables.recipe_table(changed)["measured"])["labels replayed"]
    assert told == ["none", "none", "base 10.0%, long 10.0%"]
    recipe = copy.deepcopy(last.recipe)
    OmegaConf.set_readonly(recipe, False)
    recipe.data.name, recipe.data.replay = {"chats": 0.75, "books": 0.25}, {"base": 0.2}
    counted = [{"mixed_labels": {"books": row["labels"] // 4, "chats": row["labels"] // 4 * 3}} for row in last.metrics]
    metrics = [row | each for row, each in zip(last.metrics, counted, strict=True)]
    table = tables.recipe_table(replace(variant, stages=[*before, replace(last, metrics=metrics, recipe=recipe)]))
    assert dict(table["measured"])["labels of the mix"] == ["none", "none", "books 25.0%, chats 75.0%"]
    assert [text for text, _ in dict(table["settings"])["data"]] == ["stdlib", "stdlib-long", "books 25%, chats 75%"]
    assert dict(table["settings"])["data.replay.base"] == [("none", False), ("none", False), ("0.2", True)]


def recipe_of(run: str, variant: str, **draft: Any) -> Any:
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
    assert methods.loss_weight(recipe_of(run, variant, **draft)) == (None if weight is None else pytest.approx(weight))


def test_the_curve_is_in_nats_a_token_or_stands_alone() -> None:
    """A draft that knows nothing of 1,024 tokens: ln 1,024 nats in each of three steps, weighted 1, 0.5 and 0.25."""
    nothing = math.log(1024)
    metrics = [{"step": 1, "loss": 1.75 * nothing, "llm_loss": 2.5}, {"step": 2, "loss": math.nan, "llm_loss": 2.5}]
    stage = Stage("base", recipe_of("demo-eagle3", "ttt", steps=3, decay=0.5), metrics)
    assert [list(each_T) for each_T in curves(stage)] == [[1.0], [pytest.approx(nothing)], [2.5]]
    assert loss_unit(stage) == "loss, nats per token"
    stage = Stage("base", recipe_of("demo-dflash", "blocks", weights="d_pace"), [{"step": 1, "loss": 4.0, "llm_loss": 2.5}])
    _, loss_T, target_T = curves(stage)
    assert (loss_T.tolist(), np.isnan(target_T).tolist()) == ([4.0], [True])
    assert loss_unit(stage) == "weighted loss"
