"""Cost ratios against a real model's parameters; tables, label placing and smoothing against plain expectations."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from longspec.atomic_files import read_json, write_json
from longspec.measure.tasks import parse
from longspec.methods.glide.layer import GlideLayer
from longspec.methods.glide.settings import Method, layer_weights
from longspec.report import prediction, tables
from longspec.report.inputs import Variant, read_variant
from longspec.report.plots import smooth
from tests.report.synthetic_run import MODEL, SETTINGS, write_data, write_variant


def test_the_cost_ratio_counts_the_weights_that_are_read() -> None:
    """All matrices of a real Qwen2 (its embedding, a table of rows, aside) and of the draft layer."""
    config = Qwen2Config(
        **{key: value for key, value in MODEL.items() if key != "model_type"},
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    shape = prediction.shape_of("m", config.to_dict())
    model = Qwen2ForCausalLM(config)
    target = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    head = model.lm_head.weight.numel()
    draft = sum(p.numel() for p in GlideLayer(config).parameters() if p.ndim == 2)
    assert layer_weights(shape) == draft
    assert prediction.cost_ratio(shape, draft, 1.0) == pytest.approx((draft + head) / target)
    assert prediction.cost_ratio(shape, draft, 0.25) == pytest.approx((draft + head / 4) / target)
    assert prediction.cost_ratio(shape, draft, 0.25, with_head=False) == pytest.approx(draft / (target - head))
    (own, *_) = prediction.predictions(shape, 2.0, 4, Method(), 0.25)
    assert own["speed_up"] == pytest.approx(2 / (1 + 4 * (draft + head / 4) / target))


def test_published_shapes_have_the_published_sizes() -> None:
    """With the embedding added: 32.8 and 8.03 billion parameters."""
    for shape, billions in zip(prediction.PUBLISHED, (32.8, 8.03), strict=True):
        assert (shape.read + shape.head) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """The demo's published variant."""
    folder = tmp_path_factory.mktemp("variant")
    write_variant(folder, "sinkpi-slicing", SETTINGS)
    return read_variant("sinkpi-slicing", folder, parse(SETTINGS))


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


def test_the_data_tables_add_up(variant: Variant, tmp_path: Path) -> None:
    raw, packed = write_data(tmp_path)
    tasks = parse(SETTINGS).tasks
    rows = tables.raw_table([read_json(path) for path in raw], [variant], tasks)
    assert [(row["name"], row["trains"], row["measures"]) for row in rows][1] == ("stdlib-long", ["long"], ["long"])
    found = tables.packed_table([read_json(path) for path in packed], [variant])
    assert [(row["name"], row["stages"], row["skipped"]) for row in found] == [
        ("stdlib", ["base"], 3),
        ("stdlib-long", ["long"], 3),
        ("puzzles", ["longcot"], 3),
    ]
    assert [(row["kind"], row["count"], row["what"], row["first"]) for row in tables.faults_table([read_json(raw[0])])] == [
        ("rejects", 1, "text: holds <NUL>", "inputs/stdlib.jsonl, 7"),
        ("notes", 12, "the line ends in CRLF", "inputs/stdlib.jsonl, 7"),
        ("align", 2, "align[0].filter: records filtered out", None),
    ]
    content = read_json(raw[0])
    content["records"]["made"] += 2
    content["records"]["train"] += 2
    write_json(raw[0], content)
    [row] = tables.raw_table([read_json(raw[0])], [variant], tasks)
    assert (row["made"], row["train"]) == (2, content["records"]["train"])


def test_smoothing_invents_nothing_at_the_ends() -> None:
    assert smooth(np.full(100, 2.5)) == pytest.approx(np.full(100, 2.5))
    line_T = np.arange(240.0)
    assert smooth(line_T)[120] == pytest.approx(120)
    assert smooth(line_T)[0] == pytest.approx(np.mean(line_T[: 240 // 24 + 1]))
    assert len(smooth(np.array([1.0]))) == 1


def test_shares_of_replayed_tokens_are_those_that_were_counted(tmp_path: Path, variant: Variant) -> None:
    """Told from the metrics, whatever the recipe asked for; without any there is no such row. Replayed rows name the stage."""
    assert "labels replayed" not in dict(tables.recipe_table(variant)["measured"])
    *before, last = variant.stages
    counted = [{"replayed_labels": {"base": 810, "long": 1620 * (number % 2)}} for number in range(len(last.metrics))]
    metrics = [row | each for row, each in zip(last.metrics, counted, strict=True)]
    recipe = copy.deepcopy(last.recipe)
    recipe._set_flag("readonly", False)
    recipe.data.replay = {"base": 0.3, "long": 0.3}
    changed = replace(variant, stages=[*before, replace(last, metrics=metrics, recipe=recipe)])
    told = dict(tables.recipe_table(changed)["measured"])["labels replayed"]
    assert told == ["none", "none", "base 10.0%, long 10.0%"]
    _, packed = write_data(tmp_path)
    content = read_json(packed[0]) | {"collation": "longcot", "sequence_length": 2048}
    write_json(packed[0], content)
    rows = tables.packed_table([read_json(packed[0])], [changed])
    assert rows[0]["stages"] == ["longcot"]
