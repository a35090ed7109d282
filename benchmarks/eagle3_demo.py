"""EAGLE-3 beside GLIDE on the demo's target: acceptance length of the final drafts over all tasks, and the seconds of training.

    snakemake compare --config 'runs=[demo,demo-eagle3]'     first; on a machine that does nothing else, for the seconds
    python benchmarks/eagle3_demo.py

Keeps of results/compare/demo_demo-eagle3.json what the bar asks for: 0.85 of GLIDE's acceptance length, within GLIDE's time.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import ROOT, describe, write
from longspec.atomic_files import read_json
from longspec.report.inputs import read_provenance, read_stage

COMPARED = ROOT / "results/compare/demo_demo-eagle3.json"
RUNS = {"demo": "sinkpi-slicing", "demo-eagle3": "ttt"}  # each in its variant
BAR = 0.85


def figures(compared: dict[str, Any]) -> dict[str, Any]:
    """Acceptance lengths by task (`all`: over all tasks), their ratio with its 95 % interval, and the seconds of training."""
    lengths = {}
    for run, variant in RUNS.items():
        name = f"{run}/{variant}"
        final = compared["final"][name]["stage"]
        found = compared["variants"][name][final] | {"all": compared["overall"][name][final]}
        lengths[run] = {task: acceptance["mean"] for task, acceptance in found.items()}
    acceptance = {}
    for row in compared["between_variants"]:
        if row["drafter"] != "final draft":
            continue
        task = row["task"] or "all"
        first, second = (lengths[run][task] for run in RUNS)
        acceptance[task] = {
            **dict(zip(RUNS, (first, second), strict=True)),
            "ratio": second / first,
            # The interval is that of the paired difference, seen from GLIDE's mean.
            "ratio_low": 1 + row["low"] / first,
            "ratio_high": 1 + row["high"] / first,
        }
    seconds = {}
    for run, variant in RUNS.items():
        folder = ROOT / "results" / run / variant
        seconds[run] = sum(read_stage(folder / stage).total("seconds") for stage in read_provenance(folder)["order"])
    return {"acceptance": acceptance, "training_seconds": seconds, "lossless": compared["lossless"]}


def main() -> None:
    """Read the comparison and keep the figures."""
    if not COMPARED.is_file():
        sys.exit(f"{COMPARED}: missing; make it: snakemake compare --config 'runs=[demo,demo-eagle3]'")
    found = figures(read_json(COMPARED))
    ratio, seconds = found["acceptance"]["all"], found["training_seconds"]
    print(f"{ratio['ratio']:.3f} ({ratio['ratio_low']:.3f} .. {ratio['ratio_high']:.3f}) of GLIDE's length; bar {BAR}")
    print(f"seconds of training: {seconds}")
    write("eagle3_demo", {"machine": describe(("torch", "transformers")), "bar": BAR, **found})


if __name__ == "__main__":
    main()
