"""SmolLM2-135M-Instruct's EAGLE-3 draft through vLLM and through ours: python benchmarks/real_llm_served.py [bf16|fp32]

After `make smollm2` and `make .venv-serve/vllm/.stamp`. Whole questions on held-out modules, greedy, chains of three, one
request at a time on two threads, by the `evaluate` verb with both engines: the same prompts, target, dtype and draft. Each
engine decodes them with and without the draft; seconds are of the tokens after the first. Bar: vLLM's acceptance length
within 2 % of ours; tokens a second, with and without, are told whichever way they fall.

bf16 (default): near-ties part the texts there, so that the two lengths are of different texts: 60 prompts, over which their
difference is known to some 2.6 %. fp32: 12, since the texts are the same in both. The difference has its 95 % interval
over the prompts; the bar is held against its mean. Each precision has a result of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine

from longspec import jsonl
from longspec.measure.estimates import estimate
from longspec.measure.lines import summarize

RUN, STAGE, DATA, MODEL = "results/smollm2-eagle3/ttt", "answers", "smollm2-questions", "models/smollm2-135m"
VOCABULARY = 8192
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


def measure(engine: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An engine's figures, over all prompts, and its line of each."""
    out = machine.WORK / f"real_llm_served/{engine}.jsonl"
    out.unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "longspec.measure", "evaluate", "--engine", engine, "--settings", json.dumps(settings)),
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
    return {name: row[name] for name in ("prompts", "new_tokens", "rounds", *SHOWN)}, lines


def apart(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], length: float) -> dict[str, float]:
    """Their acceptance length less ours, as a share of ours, with its interval; texts that their first token ends have none."""
    pairs = [(their, own) for their, own in zip(theirs, ours, strict=True) if their["rounds"] and own["rounds"]]
    assert all(their["prompt_hash"] == own["prompt_hash"] for their, own in pairs)
    ratios = [tuple([line[name] for line in lines] for name in ("new_tokens", "rounds")) for lines in zip(*pairs, strict=True)]
    return {name: value / length for name, value in estimate(*ratios).items()}


def main() -> None:
    """Measure, hold against the bar, write."""
    precision = (sys.argv[1:] or ["bf16"])[0]
    if precision not in RESULTS:
        sys.exit(f"{precision}: choose {' or '.join(RESULTS)}")
    settings = SETTINGS | {"precision": precision, "prompts": PROMPTS[precision]}
    description = machine.describe(("torch", "transformers"))
    (ours, own_lines), (theirs, their_lines) = (measure(engine, settings) for engine in ("longspec", "vllm"))
    between = apart(their_lines, own_lines, ours["acceptance_length"])
    holds = {"acceptance": abs(between["mean"]) <= MOST_APART}
    engines = {"longspec": ours, "vllm": theirs}
    settings |= {"threads": THREADS}
    numbers = {"machine": description, "settings": settings, "engines": engines, "apart": between, "holds": holds}
    machine.write(RESULTS[precision], numbers)
    print(json.dumps(between | holds))


if __name__ == "__main__":
    main()
