"""SmolLM2-135M-Instruct's drafts through vLLM and through ours: python benchmarks/real_llm_served.py [bf16|fp32] [RUN]

RUN: smollm2-eagle3 (default), smollm2-glide or smollm2-dflash. After `make smollm2 SMOLLM2=RUN` and
`make .venv-serve/vllm/.stamp`. Whole questions on held-out modules, greedy, chains of three, one request at a time on two
threads, by the `evaluate` verb with both engines. Both have the same prompts, target, dtype and draft. Each engine decodes
them with and without the draft; seconds are of the tokens after the first. Bar: vLLM's acceptance length within 2 % of ours;
tokens a second are told as they fall.

bf16 (default): near-ties part the texts there, so that the two lengths are of different texts: 60 prompts, over which their
difference is known to some 2.6 %. fp32: 12, since the texts are the same in both. The difference has its 95 % interval
over the prompts; the bar is held against its mean. Each precision has a result of its own.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
import yaml

from longspec import jsonl
from longspec.config import yaml_files
from longspec.measure.estimates import estimate
from longspec.measure.lines import summarize

STAGE, DATA, MODEL = "answers", "smollm2-questions", "models/smollm2-135m"
# Folder of each run's variant, and the file of its draft's vocabulary. GLIDE's draft proposes all tokens in vLLM, and so here.
RUNS = {
    "smollm2-eagle3": ("results/smollm2-eagle3/ttt", "draft_vocabulary_8192.json"),
    "smollm2-glide": ("results/smollm2-glide/sinkpi-slicing", None),
    "smollm2-dflash": ("results/smollm2-dflash/blocks", "draft_vocabulary_8192.json"),
}
SETTINGS = {
    "new_tokens": 96,
    "repeats": 1,
    "temperatures": [0],
    "shapes": [3],
    "seed": 1,
    "tasks": {"questions": {"data": DATA, "context": [16, 1280], "whole_questions": True}},
}
THREADS, MOST_APART = 2, 0.02
PROMPTS = {"bf16": 60, "fp32": 12}
RESULTS = {"bf16": "real_llm_served", "fp32": "real_llm_served_fp32"}
SHOWN = ("acceptance_length", "position_acceptance", "tokens_per_second", "tokens_per_second_plain", "mismatches", "near_ties")


def recipe_of(run: str, precision: str) -> str:
    """Write a run's recipe with another precision, which is that of the evaluation; return its path."""
    made = machine.WORK / f"real_llm_served/{run}_{precision}.yaml"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(yaml.safe_dump(yaml_files.read(Path(RUNS[run][0], STAGE, "recipe.yaml")) | {"precision": precision}))
    return str(made)


def measure(run: str, engine: str, precision: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an engine's figures of a run's draft, over all prompts, and its line of each."""
    folder, vocabulary = RUNS[run]
    out = machine.WORK / f"real_llm_served/{run}_{engine}.jsonl"
    out.unlink(missing_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "longspec.measure", "evaluate", "--engine", engine, "--settings", json.dumps(settings)),
            *("--target", f"{MODEL}/target_manifest.json", "--raw", f"{DATA}=data/raw/{DATA}/manifest.json"),
            *("--drafter", STAGE, "--draft", f"{folder}/{STAGE}/draft", "--recipe", recipe_of(run, precision)),
            *(("--vocabulary", f"{folder}/{vocabulary}") if vocabulary else ()),
            *("--out", str(out)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)},
        check=True,
    )
    lines = [line | {"context_tokens": 0} for line in jsonl.read(Path(out))]  # one row for prompts of every length
    (row,) = summarize(lines)
    print(engine, {name: row[name] for name in SHOWN}, flush=True)
    return {name: row[name] for name in ("prompts", "new_tokens", "rounds", *SHOWN)}, lines


def apart(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], length: float) -> dict[str, float]:
    """Their acceptance length less ours, as a share of ours, with its interval; texts that their first token ends have none."""
    pairs = [(their, own) for their, own in zip(theirs, ours, strict=True) if their["rounds"] and own["rounds"]]
    assert all(their["prompt_hash"] == own["prompt_hash"] for their, own in pairs)
    ratios = [tuple([line[name] for line in lines] for name in ("new_tokens", "rounds")) for lines in zip(*pairs, strict=True)]
    return {name: value / length for name, value in estimate(*ratios).items()}


def main() -> None:
    """Measure, hold against the bar, write."""
    parser = argparse.ArgumentParser(description="A draft of SmolLM2-135M through vLLM and through ours.")
    parser.add_argument("precision", nargs="?", choices=RESULTS, default="bf16")
    parser.add_argument("run", nargs="?", choices=RUNS, default="smollm2-eagle3")
    parser.add_argument("--result", metavar="NAME", help="of the file to write; default: by the precision")
    options = parser.parse_args()
    precision, run = options.precision, options.run
    settings = SETTINGS | {"prompts": PROMPTS[precision]}
    description = machine.describe(("torch", "transformers"))
    (ours, own_lines), (theirs, their_lines) = (measure(run, engine, precision, settings) for engine in ("longspec", "vllm"))
    between = apart(their_lines, own_lines, ours["acceptance_length"])
    holds = {"acceptance": abs(between["mean"]) <= MOST_APART}
    engines = {"longspec": ours, "vllm": theirs}
    raw = json.loads(Path(f"data/raw/{DATA}/manifest.json").read_text(encoding="utf-8"))
    settings |= {"precision": precision, "threads": THREADS, "run": run, "trained_questions": raw["records"]["train"]}
    numbers = {"machine": description, "settings": settings, "engines": engines, "apart": between, "holds": holds}
    machine.write(options.result or RESULTS[precision], numbers)
    print(json.dumps(between | holds))


if __name__ == "__main__":
    main()
