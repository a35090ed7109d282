"""SmolLM2-135M-Instruct's EAGLE-3 draft through vLLM and through ours: python benchmarks/real_llm_served.py

After `make smollm2` and `make .venv-serve/.stamp`. Whole questions on held-out modules, greedy, chains of three, one request at
a time on two threads, by the `evaluate` verb with both engines: the same prompts, target, dtype and draft. Each engine decodes
them with and without the draft; seconds are of the tokens after the first, the median of 3 repeats. Bar: vLLM's acceptance
length within 2 % of ours in float32, where both write the same texts; in bfloat16 near-ties part the texts, so that the two
lengths are of different ones. Tokens a second, with and without, are told in both, whichever way they fall.
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
    "repeats": 3,
    "seed": 1,
    "tasks": {"questions": {"data": DATA, "context": [16, 1280], "whole_questions": True}},
}
THREADS, MOST_APART = 2, 0.02
PRECISIONS = ("fp32", "bf16")  # of evaluation.precision
ENGINES = ("longspec", "vllm")
SHOWN = ("acceptance_length", "position_acceptance", "tokens_per_second", "tokens_per_second_plain", "mismatches", "near_ties")


def measure(engine: str, precision: str) -> dict[str, Any]:
    """An engine's figures, over all prompts."""
    out = machine.WORK / f"real_llm_served/{engine}-{precision}.jsonl"
    out.unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(SETTINGS | {"precision": precision})
    subprocess.run(
        [
            *(sys.executable, "-m", "longspec.evaluate", "--engine", engine, "--settings", settings),
            *("--target", f"{MODEL}/target_manifest.json", "--raw", f"{DATA}=data/raw/{DATA}/manifest.json"),
            *("--drafter", STAGE, "--draft", f"{RUN}/{STAGE}/draft", "--recipe", f"{RUN}/{STAGE}/recipe.yaml"),
            *("--vocabulary", f"{RUN}/draft_vocabulary_{VOCABULARY}.json", "--out", str(out)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)},
        check=True,
    )
    lines = [line | {"context_tokens": 0} for line in jsonl.read(Path(out))]  # one row for prompts of every length
    (row,) = summarize(lines)
    print(engine, precision, {name: row[name] for name in SHOWN}, flush=True)
    return {name: row[name] for name in ("prompts", "new_tokens", "rounds", *SHOWN)}


def main() -> None:
    """Measure, hold against the bar, write."""
    description = machine.describe(("torch", "transformers"))
    found = {precision: {engine: measure(engine, precision) for engine in ENGINES} for precision in PRECISIONS}
    apart = {
        precision: each["vllm"]["acceptance_length"] / each["longspec"]["acceptance_length"] - 1
        for precision, each in found.items()
    }
    holds = {"acceptance": abs(apart["fp32"]) <= MOST_APART}
    settings = SETTINGS | {"threads": THREADS}
    numbers = {"machine": description, "settings": settings, "engines": found, "apart": apart, "holds": holds}
    machine.write("real_llm_served", numbers)
    print(json.dumps(apart | holds))


if __name__ == "__main__":
    main()
