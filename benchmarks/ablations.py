"""The paper's two ablations at the demo's scale: python benchmarks/ablations.py [--seeds 42 43 44]

Trains config/run/ablation-*.yaml once for each seed (four to eight minutes a run, after `make demo`) in a copy of the workflow
that takes over the demo's target and data, and keeps what `snakemake compare` finds: acceptance lengths on the same prompts,
by context length too, and (where the losses ask the same) how much sooner one run reaches the loss at which the other one
ends. Killed, it goes on; another target or other data want an empty .cache/benchmarks/ablations.
"""

import argparse
import json
import statistics
import sys
from typing import Any

import machine
from workflow_copy import WorkflowCopy

from longspec.config import stages_of

REFERENCE = "ablation-reference"
LEFT_OUT = {"anchor-offset positions": "ablation-plain-positions", "random lag": "ablation-lag-1"}
VARIANT = "sinkpi-slicing"
BUILT = ("models/demo", "data")
COPY = WorkflowCopy(machine.WORK / "ablations")


def add_seed(run: str, seed: int) -> str:
    """A run that differs from `run` in its seed alone; its name."""
    return COPY.add_run(f"{run}-seed-{seed}", run, stages_of(run), recipe={"seed": seed})


def compare(without: str, whole: str) -> dict[str, Any]:
    """What `snakemake compare` finds of two runs, of which those not there are trained."""
    COPY.make("compare", "--config", f"runs=[{without},{whole}]")
    numbers: dict[str, Any] = json.loads((COPY.folder / f"results/compare/{without}_{whole}.json").read_text())
    return numbers["variants"][VARIANT]


def found(numbers: dict[str, Any], without: str, whole: str) -> dict[str, Any]:
    """Of one comparison: each stage's drafts by task, the first stage's by context length, and the losses.

    All runs of a seed see the same rows in the same steps.
    """
    stages = [row["stage"] for row in numbers["sooner"]]
    lengths = {
        f"{row['drafter']}, {row['task'] or 'all'}": {
            "without": row["first"]["mean"],
            "with": row["second"]["mean"],
            **{key: row[key] for key in ("difference", "low", "high")},
        }
        for row in numbers["acceptance"]
        if row["drafter"] in stages
    }
    contexts = {
        f"{stages[0]}, {one['task']}, {one['from']} to {one['to']}": {"without": one["mean"], "with": other["mean"]}
        for one, other in zip(*(numbers["by_context"][run][stages[0]] for run in (without, whole)), strict=True)
    }
    ends = {(row["run"], row["stage"]): [round(row[key], 3) for key in ("first_loss", "loss")] for row in numbers["training"]}
    losses = {stage: {"without": ends[without, stage], "with": ends[whole, stage]} for stage in stages}
    return {"accepted_length": lengths, "by_context": contexts, "losses": losses, "sooner": numbers["sooner"]}


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
