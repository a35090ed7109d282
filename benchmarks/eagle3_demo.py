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

COMPARED = ROOT / "results/compare/demo_demo-eagle3.json"
RUNS = ("demo", "demo-eagle3")
BAR = 0.85


def figures(compared: dict[str, Any]) -> dict[str, Any]:
    """Acceptance lengths by task (`all`: over all tasks), their ratio with its 95 % interval, and the seconds of training."""
    (pair,) = compared["variants"].values()
    final = pair["finals"] if isinstance(pair["finals"], str) else pair["finals"][-1]
    acceptance = {}
    for row in pair["acceptance"]:
        if row["drafter"] != final:
            continue
        first, second = row["first"]["mean"], row["second"]["mean"]
        acceptance[row["task"] or "all"] = {
            **dict(zip(RUNS, (first, second), strict=True)),
            "ratio": second / first,
            # The interval is that of the paired difference, seen from GLIDE's mean.
            "ratio_low": 1 + row["low"] / first,
            "ratio_high": 1 + row["high"] / first,
        }
    seconds = {run: sum(stage["seconds"] for stage in pair["training"] if stage["run"] == run) for run in RUNS}
    return {"acceptance": acceptance, "training_seconds": seconds, "lossless": pair["lossless"]}


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
