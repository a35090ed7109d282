"""One training step of an EAGLE-3 draft beside one of the package speculators' Eagle3DraftModel, on a CPU.

    python benchmarks/eagle3_speculators.py --python /tmp/speculators/bin/python [--repeats 3]

The interpreter is one of the environment that tests/golden/shared.py describes. Both take forward, losses and backward of
chains of 7 over a text of 1,024 tokens, from random states of a target, in float32 on one thread, and both train the head; that
they compute the same is held in tests/methods/test_golden.py. Ours also multiplies by the target's whole head, to leave
out where the target prefers a token outside the draft vocabulary; theirs takes that of the draft vocabulary alone. Of their
attention backends `eager` and `sdpa` train on a CPU: both are measured, in turns with ours, each step in a process of its own.
Ratios are ours over theirs, below 1 where ours is less; seconds are medians of processor time, with the least and the most. It
fails where ours takes longer or more memory than one of theirs. Kept in benchmarks/results/eagle3_speculators_cpu.json.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.eagle3_step import build, settings_of, step_of
from benchmarks.machine import describe, write
from benchmarks.peak import in_own_process, measure
from longspec.methods.eagle3.settings import Settings

SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
CASE = {"shape": SHAPE, "vocabulary": 8192, "length": 1024, "steps": Settings().steps, "decay": Settings().decay}
THEIRS = ("eager", "sdpa")
THEIR_SCRIPT = str(Path(__file__).with_name("speculators_step.py"))


def run_case(case: dict[str, Any]) -> None:
    """Measure and print one step of ours."""
    device = torch.device("cpu")
    trainer = build(settings_of(case["vocabulary"]), device, torch.float32, case["shape"])
    for parameter in trainer.draft_model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step_of(trainer, 64)()  # thread pools and kernels
    print(json.dumps(measure(step_of(trainer, case["length"]), device)))


def one(name: str, python: str, **environment: str) -> dict[str, Any]:
    """One step of ours, or of theirs with this attention, in a process of its own."""
    if name == "ours":
        return in_own_process(__file__, CASE, **environment)
    return in_own_process(THEIR_SCRIPT, CASE | {"attention": name}, python, **environment)


def summary(runs: list[dict[str, Any]], memory: dict[str, Any]) -> dict[str, Any]:
    """The median of all runs' seconds with their spread, and the peak."""
    seconds = sorted(run["seconds"] for run in runs)
    return {
        "seconds": round(statistics.median(seconds), 3),
        "least and most": [round(seconds[0], 3), round(seconds[-1], 3)],
        "MiB": round(memory["MiB"], 1),
    }


def main() -> None:
    """Both in turns; fails when a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter that has speculators 0.9.0")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each that are timed")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case)
        return
    if options.python is None:
        parser.error("--python: give an interpreter that has speculators 0.9.0, as tests/golden/shared.py says")
    about: dict[str, Any] = describe(("torch", "transformers"))
    names = ("ours", *THEIRS)
    # Freed memory goes back to the system at once, which costs time: such runs tell the peak alone.
    memory = {name: one(name, options.python, MALLOC_MMAP_THRESHOLD_="65536") for name in names}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            runs[name].append(one(name, options.python))
    found = {name: summary(runs[name], memory[name]) for name in names}
    ratios = {name: {key: round(found["ours"][key] / found[name][key], 3) for key in ("seconds", "MiB")} for name in THEIRS}
    about |= {"case": CASE, "repeats": options.repeats, "versions of theirs": memory[THEIRS[0]]["versions"]}
    write("eagle3_speculators_cpu", about | {"runs": found, "ours over theirs": ratios})
    print(json.dumps({"runs": found, "ours over theirs": ratios}, indent=2))
    if wrong := [f"{key}: {each[key]} of {name}'s" for name, each in ratios.items() for key in each if each[key] > 1]:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
