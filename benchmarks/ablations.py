"""The paper's two ablations at the demo's scale: python benchmarks/ablations.py [--seeds 42 43 44]

Trains config/run/ablation-*.yaml of this folder once for each seed (four to eight minutes a run, after `make demo`) in a copy
of the workflow that takes over the demo's target and data, and keeps what `snakemake compare` finds: acceptance lengths on the
same prompts, by context length too, and (where the losses ask the same) how much sooner one run reaches the loss at which the
other one ends. Killed, it goes on; another target or other data want an empty .cache/benchmarks/ablations.
"""

import argparse
import json
import statistics
import sys
from typing import Any

import machine
import numpy as np
from omegaconf import OmegaConf
from workflow_copy import EXPERIMENTS, WorkflowCopy

from longspec.config import stages_of
from longspec.report.inputs import Stage, read_stage
from longspec.report.plots import curves, smooth

REFERENCE = "ablation-reference"
LEFT_OUT = {"anchor-offset positions": "ablation-plain-positions", "random lag": "ablation-lag-1"}
VARIANT = "sinkpi-slicing"
# The settings without which two losses cannot be compared: on which text, how much of it in a step, and what is learnt.
DECIDE_LOSS = ("data", "global_batch", "draft.loss", "draft.temperature", "draft.lag_mode", "draft.lag")
BUILT = ("models/demo", "data")
COPY = WorkflowCopy(machine.WORK / "ablations")


def add_seed(run: str, seed: int) -> str:
    """A run that differs from `run` in its seed alone; its name."""
    return COPY.add_run(f"{run}-seed-{seed}", run, {stage: {"recipe": {"seed": seed}} for stage in stages_of(run, EXPERIMENTS)})


def compare(without: str, whole: str) -> dict[str, Any]:
    """What `snakemake compare` finds of two runs, of which those not there are trained."""
    COPY.make("compare", "--config", f"runs=[{without},{whole}]")
    numbers: dict[str, Any] = json.loads((COPY.folder / f"results/compare/{without}_{whole}.json").read_text())
    return numbers


def found(numbers: dict[str, Any], without: str, whole: str) -> dict[str, Any]:
    """Of one comparison: each stage's drafts by task, the first stage's by context length, and the losses.

    All runs of a seed see the same rows in the same steps.
    """
    names = {"without": f"{without}/{VARIANT}", "with": f"{whole}/{VARIANT}"}
    stages = stages_of(REFERENCE, EXPERIMENTS)
    lengths = {}
    for row in numbers["between_variants"]:
        if row["drafter"] in stages:
            lengths[f"{row['drafter']}, {row['task'] or 'all'}"] = {
                side: (numbers["variants"][name][row["drafter"]] | {None: numbers["overall"][name][row["drafter"]]})[
                    row["task"]
                ]["mean"]
                for side, name in names.items()
            } | {key: row[key] for key in ("difference", "low", "high")}
    contexts = {
        f"{stages[0]}, {one['task']}, {one['from']} to {one['to']}": {"without": one["mean"], "with": other["mean"]}
        for one, other in zip(*(numbers["by_context"][name][stages[0]] for name in names.values()), strict=True)
    }
    trained = {
        stage: {run: read_stage(COPY.folder / "results" / run / VARIANT / stage) for run in (without, whole)}
        for stage in stages
    }
    losses = {stage: {"without": ends(pair[without]), "with": ends(pair[whole])} for stage, pair in trained.items()}
    told = {"accepted_length": lengths, "by_context": contexts, "losses": losses}
    return told | {"sooner": [{"stage": stage} | sooner(pair) for stage, pair in trained.items()]}


def ends(stage: Stage) -> list[float]:
    """Mean losses of the first and the last twelfth of a stage's steps, in nats a token."""
    part = max(1, len(stage.metrics) // 12)
    return [round(statistics.mean(row["loss"] for row in rows), 3) for rows in (stage.metrics[:part], stage.metrics[-part:])]


def sooner(pair: dict[str, Stage]) -> dict[str, Any]:
    """The smoothed loss at which the higher run ends, and the step from which on the other is as low.

    `times`: the higher one's steps over that step. All None where the recipes' losses ask different things.
    """
    asked = [[OmegaConf.select(stage.recipe, key) for key in DECIDE_LOSS] for stage in pair.values()]
    if asked[0] != asked[1]:
        return dict.fromkeys(("loss", "higher", "steps", "lower", "step", "times"))
    found = {run: curves(stage)[:2] for run, stage in pair.items()}
    smoothed = {run: smooth(loss_T) for run, (_, loss_T) in found.items()}
    lower, higher = sorted(smoothed, key=lambda run: float(smoothed[run][-1]))
    loss, steps = float(smoothed[higher][-1]), int(found[higher][0][-1])
    above = np.flatnonzero(smoothed[lower] > loss)
    step = int(found[lower][0][above[-1] + 1 if len(above) else 0])
    return {"loss": loss, "higher": higher, "steps": steps, "lower": lower, "step": step, "times": steps / step}


def over_seeds(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and each seed's gain in percent, of every figure that stands twice."""
    merged = {}
    for part in ("accepted_length", "by_context"):
        for name in seeds[0][part]:
            values = [seed[part][name] for seed in seeds]
            means = {key: round(statistics.mean(value[key] for value in values), 3) for key in ("without", "with")}
            gains = [round(100 * (value["with"] / value["without"] - 1), 1) for value in values]
            merged[name] = means | {"gain_percent": round(statistics.mean(gains), 1), "each_seed": gains}
    return merged


def main() -> None:
    """Train, compare, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    seeds = parser.parse_args().seeds
    if missing := [part for part in BUILT if not (machine.ROOT / part).exists()]:
        sys.exit(f"error: {missing[0]} is not there; run `make demo` first")
    COPY.refresh()
    COPY.take(BUILT)
    told = {}
    for name, run in LEFT_OUT.items():
        pairs = [(add_seed(run, seed), add_seed(REFERENCE, seed)) for seed in seeds]
        each = [found(compare(*pair), *pair) for pair in pairs]
        told[name] = {"means": over_seeds(each), "seeds": dict(zip(map(str, seeds), each, strict=True))}
    machine.write("ablations", {"machine": machine.describe(("torch", "transformers", "deepspeed")), "ablations": told})


if __name__ == "__main__":
    main()
