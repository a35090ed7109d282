"""Soft labels against hard ones: the demo's draft trained on either, everything else alike: python benchmarks/labels.py

Trains both variants of the demo beside each other (minutes, after `make demo`) and keeps the mean accepted length of each
stage over all held-out kinds of text, with its 95 % interval. Soft labels are the default because of these figures.
"""

import json
import subprocess

import machine

VARIANTS = {"soft": "sinkpi-slicing", "hard": "hard-labels"}


def main() -> None:
    """Train, evaluate, compare."""
    variants = ",".join(VARIANTS.values())
    subprocess.run(["snakemake", "final_draft", "--config", f"variants=[{variants}]"], cwd=machine.ROOT, check=True)
    overall = json.loads((machine.ROOT / "results/demo/report.json").read_text())["overall"]
    lengths = {labels: overall[variant] for labels, variant in VARIANTS.items()}
    stages = [name for name in lengths["soft"] if name not in ("lookup", "untrained")]
    holds = all(lengths["soft"][stage]["low"] > lengths["hard"][stage]["high"] for stage in stages)
    machine.write("labels", {"machine": machine.describe(("torch",)), "accepted_length": lengths, "holds": holds})


if __name__ == "__main__":
    main()
