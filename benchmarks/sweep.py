"""What lets the demo's draft learn faster: its recipe with one setting changed at a time, and several seeds.

    python benchmarks/sweep.py --seeds 42                             every setting of both methods (after `make demo`)
    python benchmarks/sweep.py --method glide --settings 'rate 0.03' 'linear' --seeds 42 43 44
    python benchmarks/sweep.py --stages base long                     more than the first stage
    python benchmarks/sweep.py --size smollm2 --settings 'linear'     on SmolLM2-135M, after methods.py --size smollm2

Snakemake trains and measures each in a copy of the workflow, .cache/benchmarks/sweep; on SmolLM2 in that of methods.py, whose
answers and states it reads. A cell is a method, a setting and a seed, and a line of benchmarks/results/sweep.jsonl as soon as
it is done: started again, the same command goes on behind the last one, and within a cell from the last checkpoint or prompt.
benchmarks/results/sweep_<size>_<last stage>.json has for each setting that stage's tokens a round, and the differences to the
setting `AdamW` of the same seed. Of several shapes the first is told, by which a stage is chosen too.

A setting is a row of SETTINGS: values of the recipe, in every stage that is trained; by AdamW, but where it says Muon. Its
rate is that of the demo's first stage; other stages, and those on SmolLM2, change theirs by the same factor. Another idea is
another row.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine
from benchmarks.cells import Cell, fill, over_seeds
from benchmarks.methods import COPY as METHODS_COPY
from benchmarks.methods import SMOLLM2, length, measured, trained
from benchmarks.workflow_copy import EXPERIMENTS, WorkflowCopy
from longspec import jsonl
from longspec.atomic_files import sha256_text
from longspec.config import compose_stage, to_yaml

ADAMW = "AdamW"
LOSSES = ("tv", "lk")  # in place of the cross entropy
CELLS = machine.RESULTS / "sweep.jsonl"
DEMO = {"glide": ("demo", "sinkpi-slicing"), "eagle3": ("demo-eagle3", "ttt")}
ZERO0 = {"deepspeed": {"zero_stage": 0, "offload_optimizer": "none"}}  # Muon wants whole matrices


@dataclass(frozen=True)
class Size:
    """A target's run and variant for each method, where they are trained, and further values for Snakemake's --config."""

    runs: dict[str, tuple[str, str]]
    copy: WorkflowCopy
    config: tuple[str, ...] = ()


RUN = "smollm2-methods"
ON_SMOLLM2 = {"glide": (RUN, "smollm2-glide"), "eagle3": (RUN, "smollm2-eagle3-window")}
SIZES = {
    "demo": Size(DEMO, WorkflowCopy(machine.WORK / "sweep")),
    "smollm2": Size(ON_SMOLLM2, METHODS_COPY, ("keep_states=true", SMOLLM2)),
}


def optimizer(name: str = "adamw", **values: Any) -> dict[str, Any]:
    """A setting of recipe.optimizer."""
    return {"optimizer": {"name": name, **values}}


def draft(**values: Any) -> dict[str, Any]:
    """A setting of recipe.draft."""
    return optimizer() | {"draft": values}


def of_optimizer(small: float, large: float, largest: float) -> dict[str, dict[str, Any]]:
    """Settings of the optimizer, with rates beside the recipe's."""
    return {
        ADAMW: optimizer(),
        **{f"rate {rate:g}": optimizer(lr=rate) for rate in (small, large, largest)},
        **{f"warm-up {share:g}": optimizer(warmup_ratio=share) for share in (0.02, 0.3)},
        "linear": optimizer(schedule="linear"),
        f"linear, rate {large:g}": optimizer(schedule="linear", lr=large),
        "Muon": optimizer("muon"),
        **{f"Muon, rate {rate:g}": optimizer("muon", lr=rate) for rate in (small, large)},
    }


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "glide": of_optimizer(1e-2, 3e-2, 4e-2)
    | {f"temperature {value:g}": draft(temperature=value) for value in (0.7, 1.5)}
    | {f"lags 1 to {lag}": draft(lag=lag) for lag in (2, 6)}  # the recipe's: 1 to 4, as a chain of four tokens sees them
    | {"lag 1 alone": draft(lag=1, lag_mode="fixed")}
    | {"start last": draft(start="last")}
    | {f"loss {loss}": draft(loss=loss) for loss in LOSSES},
    "eagle3": of_optimizer(3e-3, 2e-2, 3e-2)
    | {f"weights {decay:g}^i": draft(decay=decay) for decay in (0.5, 1.0)}  # of a chain's positions; the recipe's: 0.8
    | {f"chains of {steps}": draft(steps=steps) for steps in (1, 4)}  # the recipe's: 2 in the first stage
    | {"start identity": draft(start="identity")}
    | {f"Muon, loss {loss}": draft(loss=loss) | optimizer("muon") for loss in LOSSES},
}


def run_of(size: str, method: str, setting: str, seed: int, stages: Sequence[str]) -> str:
    """The name of a run with one setting and seed, which is written into the copy."""
    run, variant = SIZES[size].runs[method]
    first = compose_stage(*DEMO[method], "base").recipe.optimizer.lr
    values = {}
    for stage in stages:
        recipe = {"seed": seed} | SETTINGS[method][setting]
        if "lr" in recipe["optimizer"]:
            factor = compose_stage(run, variant, stage, EXPERIMENTS).recipe.optimizer.lr / first
            recipe["optimizer"] = recipe["optimizer"] | {"lr": recipe["optimizer"]["lr"] * factor}
        values[stage] = {"recipe": recipe, "runtime": ZERO0 if recipe["optimizer"]["name"] == "muon" else {}}
    words = re.findall(r"[A-Za-z0-9.]+", setting)
    name = "-".join(["sweep", method, *words, "to", stages[-1], "seed", str(seed)])
    if (size, setting) == ("smollm2", ADAMW):
        name = f"{run}-seed-{seed}"  # as methods.py has trained it
    return SIZES[size].copy.add_run(name, run, values)


def identity(size: str, method: str, setting: str, seed: int, stages: Sequence[str]) -> Cell:
    """The fields that a cell is known by; `decided_by`: a hash of the recipes."""
    run, variant = run_of(size, method, setting, seed, stages), SIZES[size].runs[method][1]
    recipes = [to_yaml(compose_stage(run, variant, stage, SIZES[size].copy.folder / "config").recipe) for stage in stages]
    decided = sha256_text(json.dumps(recipes))[:16]
    return {"size": size, "method": method, "setting": setting, "seed": seed, "stages": list(stages), "decided_by": decided}


def make_cell(which: Cell, cores: str) -> Cell:
    """Train a setting from a seed, and read how its last stage drafts."""
    size, stages = SIZES[which["size"]], which["stages"]
    run = run_of(*(which[name] for name in ("size", "method", "setting", "seed", "stages")))
    results = f"results/{run}/{size.runs[which['method']][1]}"
    made = f"{results}/evaluation/{stages[-1]}.jsonl"
    size.copy.make(made, "--cores", cores, "--config", f"runs=[{run}]", *size.config)
    lines = list(jsonl.read(size.copy.folder / made))
    rows = measured([line for line in lines if line["shape"] == lines[0]["shape"]])
    steps = {stage: list(jsonl.read(size.copy.folder / f"{results}/{stage}/metrics.jsonl")) for stage in stages}
    return {
        "cores": cores,
        "tokens_a_round": {"all": length(rows)} | {row["task"]: length([row]) for row in rows},
        "training": {stage: trained(held) | {"last_loss": held[-1]["loss"]} for stage, held in steps.items()},
    }


def table(cells: Sequence[Cell]) -> dict[str, Any]:
    """By method and setting, tokens a round and their difference to AdamW's of the same seeds; the best setting first."""
    told: dict[str, Any] = {}
    for method in SETTINGS:
        of_method = [cell for cell in cells if cell["method"] == method]
        adamw = {cell["seed"]: cell["tokens_a_round"] for cell in of_method if cell["setting"] == ADAMW}
        rows = {}
        for setting in SETTINGS[method]:
            found = {cell["seed"]: cell["tokens_a_round"] for cell in of_method if cell["setting"] == setting}
            paired = [seed for seed in found if seed in adamw]
            rows[setting] = {
                task: over_seeds([lengths[task] for lengths in found.values()])
                | ({"to AdamW": over_seeds([found[seed][task] - adamw[seed][task] for seed in paired])} if paired else {})
                for task in next(iter(found.values()), {})
            }
        told[method] = dict(sorted(((s, row) for s, row in rows.items() if row), key=lambda item: -item[1]["all"]["mean"]))
    return told


def main() -> None:
    """Make the cells that are missing, and the table of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--method", choices=list(SETTINGS), nargs="+", default=list(SETTINGS))
    parser.add_argument("--settings", nargs="+", help="of SETTINGS; AdamW's are made in any case")
    parser.add_argument("--stages", nargs="+", default=["base"], help="the first ones of the demo's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--cores", default="all", help="as of snakemake")
    options = parser.parse_args()
    known = {setting for method in options.method for setting in SETTINGS[method]}
    if unknown := set(options.settings or ()) - known:
        sys.exit(f"error: --settings: {', '.join(sorted(unknown))}: known: {', '.join(sorted(known))}")
    size, stages = SIZES[options.size], options.stages if options.size == "demo" else ["answers"]
    size.copy.refresh()
    if options.size == "demo":
        size.copy.take(["models/demo", "data"])
    chosen = [(method, setting) for method in options.method for setting in SETTINGS[method]]
    if options.settings:
        chosen = [(method, setting) for method, setting in chosen if setting in (ADAMW, *options.settings)]
    wanted = [identity(options.size, method, setting, seed, stages) for seed in options.seeds for method, setting in chosen]
    fill(CELLS, wanted, lambda which: make_cell(which, options.cores))
    asked = {"size": options.size, "stages": stages}
    cells = [cell for cell in jsonl.read(CELLS) if asked.items() <= cell.items() and is_current(cell)]
    told = {"machine": machine.describe(("torch", "transformers", "deepspeed"))} | asked
    machine.write(f"sweep_{options.size}_{stages[-1]}", told | {"methods": table(cells)})


def is_current(cell: Cell) -> bool:
    """Whether a cell was made of what its setting is now."""
    names = ("size", "method", "setting", "seed", "stages")
    known = cell["setting"] in SETTINGS[cell["method"]]
    return known and identity(*(cell[name] for name in names)).items() <= cell.items()


if __name__ == "__main__":
    main()
