"""What later stages forget of earlier ones, and what helps: the demo's stages trained in several ways, from several seeds.

    snakemake final_draft                        first: the demo's target and data are taken
    python benchmarks/forgetting.py --seeds 42 43 44

A way (WAYS) changes some stages of the recipe that the demo had before the best of them became it (FORMER); all stages together
take as long as they did. A stage that two ways have in common is trained once. Stages are trained by a plain loop in this
process, with the workflow's rows, draws, losses and schedule. Then the final draft decodes the demo's held-out prompts in
chains of 4: tokens a round, over all tasks and by task. Of the former recipe and the best way every stage's draft is measured.

A cell is a way and a seed, and a line of .cache/benchmarks/forgetting.jsonl as soon as it is done: started again, the same
command goes on behind the last one. Told are the differences to the best single stage of the former recipe of the same seed:
their mean over the seeds, with its 95 % interval (Student's t).
"""

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import machine
import torch
import yaml
from cells import fill, over_seeds
from safetensors.torch import load_file, save_file
from top_k_training import train
from transformers import AutoTokenizer

from longspec import methods
from longspec.atomic_files import new_file, read_json, sha256_text
from longspec.config import compose, to_yaml
from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows, open_alike
from longspec.decode.cache import tokens_ahead
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.distributed import Ranks
from longspec.families import position_limit
from longspec.jsonl import whole_lines
from longspec.measure import tasks
from longspec.measure.prompts import draw_prompts
from longspec.methods import method_of
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.micro_batches import StepBatches

STAGES = ("base", "long", "longcot")
TARGET = Path("models/demo/target_manifest.json")
WORK = machine.WORK / "forgetting"
CELLS = machine.WORK / "forgetting.jsonl"
CHAIN, PROMPTS_AT_ONCE = 4, 8
AVERAGE = "average"  # of a way: weights of the stages whose drafts the final draft is the mean of
LAST_TWO = {"long": 0.5, "longcot": 0.5}


def replaying(base: float, long: float, rate: float = 1e-4, more: Sequence[str] = ()) -> dict[str, Any]:
    """A third stage with these shares of earlier stages' data, at a rate."""
    return {"longcot": [f"++recipe.data.replay={{base: {base}, long: {long}}}", f"recipe.optimizer.lr={rate}", *more]}


# On one core a step of the second stage takes 1.78 s, one of 2 rows of the third 0.58 s: 48 of the one take as long as giving
# the third 112 steps of 4 rows in the place of 80 of 2, or 74 of 2 rows as long as the second stage's.
SHORT_STEPS, LONG_STEPS = ("recipe.global_batch=4", "recipe.steps=112"), ("recipe.data.sequence_length=4096", "recipe.steps=74")

# The third stage's rows at positions as far as the longest prompts.
ANCHORS = ("recipe.draft.anchors_up_to=2048", "recipe.draft.max_position=4096")


def shifted(base: float, long: float, rate: float, more: Sequence[str] = SHORT_STEPS) -> dict[str, Any]:
    """Three quarters of the second stage's time given to a third that replays."""
    return {"long": ["recipe.steps=16"]} | replaying(base, long, rate, more)


BEFORE, BEST = "the former recipe", "the demo's"
FORMER = {
    "base": [
        "recipe.data.sequence_length=512",
        "recipe.global_batch=4",
        "recipe.draft.start=random",
        "recipe.optimizer.lr=1e-2",
    ],
    "long": ["recipe.optimizer.lr=5e-3", "recipe.steps=64"],
    "longcot": ["~recipe.data.replay.base", "~recipe.data.replay.long", "recipe.optimizer.lr=1e-4", "recipe.steps=80"],
}
MIDDLE = ["recipe.draft.start=middle", "recipe.optimizer.lr=2e-2"]
SHORT_ROWS = ["recipe.data.sequence_length=128", "recipe.global_batch=16"]
WAYS: dict[str, dict[str, Any]] = {
    BEFORE: {},
    "mean of the last two stages": {AVERAGE: LAST_TWO},
    "rate 1e-3": {"longcot": ["recipe.optimizer.lr=1e-3"]},
    "replay 0.50": replaying(0.25, 0.25),
    "replay 0.50, rate 1e-3": replaying(0.25, 0.25, 1e-3),
    "replay 0.66, rate 1e-3": replaying(0.33, 0.33, 1e-3),
    "replay 0.66, rate 3e-3, mean of the last two stages": replaying(0.33, 0.33, 3e-3) | {AVERAGE: LAST_TWO},
    "replay 0.75, rate 2e-3": replaying(0.25, 0.5, 2e-3),
    "replay 0.75, rate 2e-3, mean of the last two stages": replaying(0.25, 0.5, 2e-3) | {AVERAGE: LAST_TWO},
    "from the middle layer, half of the second stage, replay 0.80": {"base": MIDDLE, "long": ["recipe.steps=36"]}
    | replaying(0.2, 0.6, 2e-3, ["recipe.steps=104"]),
    BEST: {"base": [*MIDDLE, *SHORT_ROWS], "long": ["recipe.steps=36", "recipe.optimizer.lr=3e-3"]}
    | replaying(0.2, 0.6, 1e-3, ["recipe.steps=104"]),
    "shifted, replay 0.85": shifted(0.3, 0.55, 5e-3),
    "shifted, replay 0.92": shifted(0.22, 0.7, 8e-3),
    "shifted, replay 0.80, rows of 4096": shifted(0.3, 0.5, 5e-3, LONG_STEPS),
    "shifted, replay 0.85, anchors": shifted(0.3, 0.55, 5e-3, (*SHORT_STEPS, *ANCHORS)),
    "more shifted, replay 0.85, anchors": {"base": ["recipe.steps=200"]}
    | shifted(0.25, 0.6, 5e-3, ("recipe.global_batch=4", "recipe.steps=152", *ANCHORS)),
}


@cache
def target() -> tuple[Any, TargetStates, Any]:
    """The demo's target, its states and its tokenizer."""
    path = read_json(TARGET)["path"]
    loaded = load_target(path, read_target_config(path), torch.float32, STATES_ATTENTION)
    return loaded, TargetStates(loaded, attention="sdpa"), AutoTokenizer.from_pretrained(path)


def recipe_of(stage: str, seed: int, overrides: list[str]) -> Any:
    """The recipe of one stage: the demo's former one with some changes."""
    return compose("train", ["run=demo", f"stage={stage}", f"recipe.seed={seed}", *FORMER[stage], *overrides]).recipe


def packed(data: Any, name: str) -> Path:
    """The rows of a dataset packed like `data` says, made where they are missing."""
    folder = Path(f"data/packed/demo/{name}-{data.collation}-{data.sequence_length}-{data.overlong}")
    if not (folder / "manifest.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shards = sorted(Path(f"data/tokens/demo/{name}").glob("*.json"))
        packing.make(shards, data.sequence_length, data.collation, data.overlong, folder / "manifest.json")
    return folder / "manifest.json"


def trained(way: dict[str, Any], seed: int, stage: str) -> dict[str, torch.Tensor]:
    """The weights of a stage, trained once for all ways that have it and those before it in common."""
    recipes = {each: recipe_of(each, seed, way.get(each, [])) for each in STAGES[: STAGES.index(stage) + 1]}
    path = WORK / f"{stage}-{sha256_text(json.dumps([to_yaml(each) for each in recipes.values()]))[:16]}.safetensors"
    if path.is_file():
        return load_file(path)
    recipe, states = recipes[stage], target()[1]
    before = STAGES[: STAGES.index(stage)][-1:]
    own = PackedRows(packed(recipe.data, recipe.data.name))
    replay = {name: packed(recipe.data, recipes[name].data.name) for name in recipe.data.replay}
    rows = TrainedRows(own, replayed=dict(zip(replay, open_alike(replay.values(), own), strict=True)))
    batches = StepBatches(rows, recipe, recipe.global_batch, Ranks(0, 0, 1), position_limit(states.config))
    method, settings = method_of(recipe)
    torch.manual_seed(seed)
    trainer = method.trainer(states, settings, None)
    if before:
        trainer.draft_model.load_state_dict(trained(way, seed, before[0]))
    train(trainer, recipe, batches, recipe.steps)
    weights = {name: tensor.detach().contiguous() for name, tensor in trainer.draft_model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as beside:
        save_file(weights, beside)
    return weights


def final(way: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The weights of a way's final draft."""
    parts = [(trained(way, seed, stage), share) for stage, share in way.get(AVERAGE, {STAGES[-1]: 1.0}).items()]
    return {name: sum(share * weights[name] for weights, share in parts) for name in parts[0][0]}  # type: ignore[misc]


@cache
def prompts() -> dict[str, list[Any]]:
    """The prompts of the demo's evaluation by task."""
    files = (Path("config/workflow.yaml"), Path("config/run/demo.yaml"))
    shared, own = (yaml.safe_load(path.read_text())["evaluation"] for path in files)
    section = shared | own
    evaluation, tokenizer = tasks.parse(section), target()[2]
    found = {}
    for name, task in evaluation.tasks.items():
        raw = Path(f"data/raw/{task.data}/manifest.json")
        found[name] = draw_prompts(name, task, raw, evaluation.prompts, tokenizer, evaluation.seed)
    return found


@cache
def started() -> dict[str, list[Any]]:
    """The prompts' caches by task: the target reads them once for all drafts."""
    loaded, reads = target()[0], drafter({}).reads
    groups: dict[str, list[Any]] = {}
    for name, each in prompts().items():
        for start in range(0, len(each), PROMPTS_AT_ONCE):
            some = each[start : start + PROMPTS_AT_ONCE]
            ahead = tokens_ahead(some[0].new_tokens + 1, CHAIN)
            made = prefill(loaded, [prompt.ids for prompt in some], ahead, reads)
            groups.setdefault(name, []).append((made, some[0].new_tokens))
    return groups


def drafter(weights: dict[str, torch.Tensor]) -> Any:
    """A draft of these weights; of fresh ones for none."""
    loaded, states, _ = target()
    method, settings = method_of(recipe_of("base", 0, []))
    layer = method.trainer(states, settings, None).draft_model
    if weights:
        layer.load_state_dict(weights)
    return methods.drafter(method.name, loaded, layer.eval(), settings, None)


def measure(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tokens and rounds by task, and tokens a round; of a chain as the demo's evaluation drafts it."""
    loaded, _, tokenizer = target()
    drafted, found = drafter(weights), {}
    for name, groups in started().items():
        rows = []
        for start, new_tokens in groups:
            rows += speculate(
                loaded, drafted, start, max_new_tokens=new_tokens + 1, shape=CHAIN, eos=tokenizer.eos_token_id
            ).rows
        found[name] = (sum(row.new_tokens for row in rows), sum(row.rounds for row in rows))
    found["all"] = tuple(map(sum, zip(*found.values(), strict=True)))
    return {name: tokens / rounds for name, (tokens, rounds) in found.items()}


def cell(name: str, seed: int) -> dict[str, Any]:
    """Train what is missing of a way, and measure its final draft; of the former recipe and the best way every stage's."""
    way = WAYS[name]
    stages = {stage: measure(trained(way, seed, stage)) for stage in STAGES} if name in (BEFORE, BEST) else {}
    return {"tokens_a_round": stages[STAGES[-1]] if stages else measure(final(way, seed)), "stages": stages}


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """By way, the differences to the best single stage of the former recipe of the same seed."""
    best = {
        each["seed"]: max(each["stages"].values(), key=lambda numbers: numbers["all"])
        for each in cells
        if each["way"] == BEFORE
    }
    told: dict[str, Any] = {}
    for name in WAYS:
        of_way = [each for each in cells if each["way"] == name and each["seed"] in best]
        for key in ("all", *prompts()) if of_way else ():
            each = [found["tokens_a_round"][key] - best[found["seed"]][key] for found in of_way]
            told.setdefault(name, {})[key] = over_seeds(each)
    return told


def main() -> None:
    """Train and measure what is missing, and tell the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [{"way": name, "seed": seed, "changes": WAYS[name]} for seed in options.seeds for name in options.ways]
    fill(CELLS, wanted, lambda which: cell(which["way"], which["seed"]))
    cells = whole_lines(CELLS)
    told = {"machine": machine.describe(("torch", "transformers")), "chain": CHAIN}
    machine.write("forgetting", told | {"differences": summary(cells), "cells": cells})


if __name__ == "__main__":
    main()
