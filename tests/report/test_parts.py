"""Tables and smoothing against plain expectations."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from longspec.measure.tasks import parse
from longspec.report import tables
from longspec.report.inputs import Variant, read_variant
from longspec.report.plots import smooth
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
