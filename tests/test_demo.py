"""The demo's bars, on the report that `make demo` left; without one these tests skip themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspec.decode.generate import load_drafter
from longspec.decode.levels import DEFAULT_SHAPE
from longspec.decode.speculate import speculate
from longspec.measure.prompts import draw_prompts
from longspec.measure.tasks import HeldOut

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


# Data, tokens of a prompt. 4 x 12 prompts x 220 tokens are 10,560.
PROMPTS = (("stdlib", 64), ("puzzles", 200), ("stdlib", 700), ("stdlib-long", 1800))
ROWS, NEW = 12, 220


@pytest.mark.slow
def test_ten_thousand_tokens_in_float64_are_those_of_generate(root: Path) -> None:
    """Those of transformers' own; with a draft prompts of four lengths together, half of them in chains and half in trees."""
    if not (root / "results/demo/report.json").exists():
        pytest.skip("the demo's drafts are not there: run `make demo` first")
    tokenizer = AutoTokenizer.from_pretrained(root / "models/demo/tokenizer")
    target = AutoModelForCausalLM.from_pretrained(root / "models/demo/target", dtype=torch.float64).eval()
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts, expected = [], []
    for data, length in PROMPTS:
        task = HeldOut(data=data, context=(length, length), new_tokens=NEW)
        prompts = draw_prompts("demo", task, root / f"data/raw/{data}/manifest.json", ROWS, tokenizer, seed=0)
        ids_BS = torch.tensor([prompt.ids for prompt in prompts])
        texts.append(ids_BS.tolist())
        expected.append(target.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), **greedy)[:, length:].tolist())
    drafter = load_drafter(target, root / f"results/demo/{VARIANT}/final_draft")
    for half, shape in enumerate((4, DEFAULT_SHAPE)):
        batch, wanted = ([row for rows in of_all for row in rows[half::2]] for of_all in (texts, expected))
        decoded = speculate(target, drafter, batch, max_new_tokens=NEW, shape=shape)
        assert [row.ids for row in decoded.rows] == wanted
        kept = sum(sum(row.accepted) for row in decoded.rows)
        assert kept > 0.4 * len(batch) * NEW  # drafted, most of it: this is no plain decoding
