"""SmolLM2-135M-Instruct's EAGLE-3 draft through vLLM and through ours: python benchmarks/real_llm_served.py [bf16|fp32]

After `make smollm2` and `make .venv-serve/.stamp`. Whole questions on held-out modules, greedy, chains of three, one request at
a time on two threads, by the `evaluate` verb with both engines: the same prompts, target, dtype and draft. Each engine decodes
them with and without the draft; seconds are of the tokens after the first. Bar: vLLM's acceptance length within 2 % of ours;
tokens a second, with and without, are told whichever way they fall.

bf16 (default): the median of 3 repeats. Near-ties part the texts there, so that the two lengths are of different texts. fp32:
a single repeat, for the acceptance over texts that are the same in both. Each precision has a result of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine

from longspec import jsonl
from longspec.evaluate.summary import summarize

RUN, STAGE, DATA, MODEL = "results/smollm2-eagle3/ttt", "answers", "smollm2-questions", "models/smollm2-135m"
VOCABULARY = 8192
SETTINGS = {
    "prompts": 12,
    "new_tokens": 96,
    "temperatures": [0],
    "shapes": [3],
    "seed": 1,
    "tasks": {"questions": {"data": DATA, "context": [16, 1280], "whole_questions": True}},
}
THREADS, MOST_APART = 2, 0.02
RESULTS = {"bf16": "real_llm_served", "fp32": "real_llm_served_fp32"}
SHOWN = ("acceptance_length", "position_acceptance", "tokens_per_second", "tokens_per_second_plain", "mismatches", "near_ties")


def measure(engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """An engine's figures, over all prompts."""
    out = machine.WORK / f"real_llm_served/{engine}.jsonl"
    out.unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "longspec.evaluate", "--engine", engine, "--settings", json.dumps(settings)),
            *("--target", f"{MODEL}/target_manifest.json", "--raw", f"{DATA}=data/raw/{DATA}/manifest.json"),
            *("--drafter", STAGE, "--draft", f"{RUN}/{STAGE}/draft", "--recipe", f"{RUN}/{STAGE}/recipe.yaml"),
            *("--vocabulary", f"{RUN}/draft_vocabulary_{VOCABULARY}.json", "--out", str(out)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)},
        check=True,
    )
    lines = [line | {"context_tokens": 0} for line in jsonl.read(Path(out))]  # one row for prompts of every length
    (row,) = summarize(lines)
    print(engine, {name: row[name] for name in SHOWN}, flush=True)
    return {name: row[name] for name in ("prompts", "new_tokens", "rounds", *SHOWN)}


def main() -> None:
    """Measure, hold against the bar, write."""
    precision = (sys.argv[1:] or ["bf16"])[0]
    if precision not in RESULTS:
        sys.exit(f"{precision}: choose {' or '.join(RESULTS)}")
    settings = SETTINGS | {"precision": precision, "repeats": 3 if precision == "bf16" else 1}
    description = machine.describe(("torch", "transformers"))
    found = {engine: measure(engine, settings) for engine in ("longspec", "vllm")}
    ours, theirs = (found[engine]["acceptance_length"] for engine in ("longspec", "vllm"))
    holds = {"acceptance": abs(theirs / ours - 1) <= MOST_APART}
    numbers = {"machine": description, "settings": settings | {"threads": THREADS}, "engines": found, "holds": holds}
    machine.write(RESULTS[precision], numbers)
    print(json.dumps(holds))


if __name__ == "__main__":
    main()
