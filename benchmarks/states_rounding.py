"""What the rounding of stored states costs in acceptance: the demo's first stage in little, trained on states of either dtype.

    snakemake compare --config 'runs=[demo,demo-eagle3]'     first: its target, rows and draft vocabulary are taken
    python benchmarks/states_rounding.py

For each method and seed a fresh draft takes the same steps on the target's states as they are computed, in float32, and as
files hold them in bfloat16 and float8; rates are the stage's over fewer steps, positions of GLIDE plain. Each draft is measured
beside the target itself, as it decodes, on held-out rows that all share: acceptance by step of drafting, tokens a round, loss.
Told are the differences to float32 of the same seed: their mean over the seeds with its 95 % interval (Student's t).

A cell is a method, a seed and a dtype, and a line of .cache/benchmarks/states_rounding.jsonl as soon as it is done: started
again, the same command goes on behind the last one.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import machine
import torch
from top_k_training import measure, train
from torch import Tensor

from longspec.atomic_files import read_json
from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.draft_vocabulary import read_draft_vocabulary
from longspec.families import position_limit
from longspec.jsonl import whole_lines
from longspec.methods import method_of, vocabulary_size
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config, target_hash
from longspec.states.declaration import Tensors, decode, encode, stored_tensors
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import EMBEDDED
from longspec.train.micro_batches import StepBatches

# Rows of 512 tokens for both; the numbers kept are of a draft that begins with random weights.
LONGER = ["recipe.data.sequence_length=512", "recipe.global_batch=4"]
RANDOM = ["recipe.draft.start=random", "recipe.optimizer.lr=1e-2", "recipe.draft.anchors=off"]
METHODS = {"glide": ["run=demo", *LONGER, *RANDOM], "eagle3": ["run=demo-eagle3"]}
DTYPES = ("float32", "bfloat16", "float8")
TARGET = Path("models/demo/target_manifest.json")
ROWS = Path("data/packed/demo/stdlib-base-512-split/manifest.json")
VOCABULARY = Path("results/demo-eagle3/ttt")
CELLS = machine.WORK / "states_rounding.jsonl"
HELD_OUT = 32
T_975 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # of Student's t by degrees of freedom


class RoundedStates(TargetStates):
    """A target whose states are rounded as files hold them."""

    def __init__(self, states: TargetStates, tensors: Tensors) -> None:
        super().__init__(states.target, attention=states.attention)
        self.tensors = tensors

    @torch.no_grad()
    def forward(self, *arguments: Any) -> dict[str, Tensor]:
        """As of TargetStates, each stored tensor encoded and decoded."""
        found = super().forward(*arguments)
        return found | decode(encode(found, self.tensors), found[EMBEDDED].dtype)


def cell(states: TargetStates, name: str, seed: int, dtype: str, steps: int) -> dict[str, Any]:
    """Train a draft of one method and seed on states of a dtype, and measure it."""
    recipe: Any = compose("train", [*METHODS[name], "stage=base", f"recipe.seed={seed}"]).recipe
    size = vocabulary_size(recipe)
    vocabulary = None if size is None else read_draft_vocabulary(VOCABULARY / f"draft_vocabulary_{size}.json")
    method, settings = method_of(recipe, vocabulary)
    rows = PackedRows(ROWS)
    batches = StepBatches(TrainedRows(rows), recipe, recipe.global_batch, Ranks(0, 0, 1), position_limit(states.config))
    tensors = stored_tensors(states.config, method.reads(states.config, settings, with_llm_loss=True), dtype, None)
    torch.manual_seed(seed)
    trainer = method.trainer(RoundedStates(states, tensors), settings, None)
    train(trainer, recipe, batches, steps)
    beside = method.trainer(states, settings, None)
    beside.load_state_dict(trainer.state_dict())
    return measure(beside, held_out_rows(rows, HELD_OUT), method.each_step(settings))


def difference(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Of a number with rounded states, less the same with the computed ones, over the seeds."""
    each = [rounded - computed for computed, rounded in pairs]
    half = T_975[len(each) - 1] * stdev(each) / len(each) ** 0.5
    return {"mean": mean(each), "interval": [mean(each) - half, mean(each) + half], "each": each}


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Each number's mean by dtype, and what a dtype changes, by method."""
    told: dict[str, Any] = {}
    for name in METHODS:
        by_dtype = {
            dtype: sorted((each for each in cells if (each["method"], each["dtype"]) == (name, dtype)), key=lambda c: c["seed"])
            for dtype in DTYPES
        }
        told[name] = {}
        for key in ("tokens_a_round", "loss"):
            values = {dtype: [each[key] for each in of] for dtype, of in by_dtype.items()}
            told[name][key] = {"mean": {dtype: mean(of) for dtype, of in values.items()}}
            for dtype in DTYPES[1:]:
                pairs = list(zip(values[DTYPES[0]], values[dtype], strict=True))
                told[name][key][f"{dtype} - {DTYPES[0]}"] = difference(pairs)
    return told


def main() -> None:
    """Train what is missing, and tell the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="3 to 8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = read_json(TARGET)["path"]
    config = read_target_config(path)
    states = TargetStates(load_target(path, config, torch.float32, STATES_ATTENTION), attention="sdpa")
    of_all = {"steps": options.steps, "target": target_hash(TARGET), "rows": PackedRows(ROWS).data_hash}
    wanted = [{"method": m, "seed": s, "dtype": d} | of_all for s in range(options.seeds) for m in METHODS for d in DTYPES]
    CELLS.parent.mkdir(parents=True, exist_ok=True)
    for which in wanted:
        if any(which.items() <= each.items() for each in whole_lines(CELLS)):
            continue
        made = which | cell(states, which["method"], which["seed"], which["dtype"], options.steps)
        print(made, flush=True)
        with CELLS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(made) + "\n")
    done = whole_lines(CELLS)
    cells = [next(each for each in done if which.items() <= each.items()) for which in wanted]
    told = {"machine": machine.describe(("torch",)), "held_out_rows": HELD_OUT} | of_all
    machine.write("states_rounding", told | {"differences": summary(cells), "cells": cells})


if __name__ == "__main__":
    main()
