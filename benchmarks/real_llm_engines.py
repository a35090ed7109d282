"""SmolLM2-135M's EAGLE-3 draft in the engines that need no GPU: python benchmarks/real_llm_engines.py [--prompts N]

After `make smollm2` and `make .venv-serve/{llama.cpp,openvino}/.stamp`. llama.cpp has the very Q4_1 file that the target came
from, the draft beside it as f16 and as q8_0; OpenVINO both in bfloat16, by chains and by its own trees; ours in bfloat16. Each
decodes the same whole questions on held-out modules with the draft and without, greedy, on two threads. A prompt and its answer
have at most 512 tokens, the draft's window, which neither engine knows. Lengths are compared with ours with their 95 %
intervals over the prompts: texts part where 4 bits or near-ties have it so. What is there already is not measured again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from real_llm_served import DATA, MODEL, RUNS, SHOWN, STAGE, THREADS, apart, recipe_of

from longspec import jsonl
from longspec.measure.lines import summarize

RUN, PRECISION = "smollm2-eagle3", "bf16"
WINDOW, NEW_TOKENS = 512, 96
SETTINGS = {
    "new_tokens": NEW_TOKENS,
    "repeats": 1,
    "temperatures": [0],
    "shapes": [3],
    "seed": 2,
    "tasks": {"questions": {"data": DATA, "context": [16, WINDOW - NEW_TOKENS - 8], "whole_questions": True}},
}
WORK = machine.WORK / "real_llm_engines"
TREE = "openvino tree"
CELLS = ("longspec", "llama.cpp f16", "llama.cpp q8_0", "openvino", TREE)


def command(*words: str) -> None:
    """Run a program of ours on the threads of this benchmark."""
    threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    subprocess.run([sys.executable, *words], env=os.environ | threads, check=True)


def once(path: Path, make: Callable[[], None]) -> Path:
    """Return a file or folder, made if it is not there."""
    if not path.exists():
        make()
    return path


def exported(layout: str, dtype: str, target: Path | None) -> Path:
    """Return the draft in a layout, written for texts of the window's length; target: where its target goes too."""
    draft = Path(RUNS[RUN][0]) / STAGE / "draft"
    out = WORK / f"draft-{dtype}.{layout}"
    words = ["export", str(draft), "--layout", layout, "--out", str(out), "--dtype", dtype, "--context", str(WINDOW)]
    more = ["--target", str(target)] if target else []
    return once(out, lambda: command("-m", "longspec.draft", *words, *more))


def served(cell: str) -> list[str]:
    """Return the options of `evaluate` by which an engine loads what a cell names."""
    engine, _, kind = cell.partition(" ")
    words = ["--engine", engine]
    if engine == "llama.cpp":
        (source,) = Path(MODEL, "wheel").glob("*.gguf")
        words += ["--served-target", str(source), "--served-draft", str(exported("gguf", kind, None))]
    if cell == TREE:
        program = WORK / "openvino_tree"
        own = Path(".venv-serve/openvino/bin/python").absolute()
        program.write_text(f'#!/bin/sh\nexec {own} {machine.ROOT}/benchmarks/openvino_tree.py "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        words += ["--serve-python", str(program)]
    return words


def measure(cell: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a cell's figures over all prompts, and its line of each."""
    folder, vocabulary = RUNS[RUN]
    out = WORK / f"{cell.replace(' ', '_')}-{settings['prompts']}.jsonl"
    inputs = ["--target", f"{MODEL}/target_manifest.json", "--raw", f"{DATA}=data/raw/{DATA}/manifest.json"]
    draft = ["--drafter", STAGE, "--draft", f"{folder}/{STAGE}/draft", "--recipe", recipe_of(RUN, PRECISION)]
    words = [*inputs, *draft, "--vocabulary", f"{folder}/{vocabulary}", *served(cell), "--settings", json.dumps(settings)]
    once(out, lambda: command("-m", "longspec.measure", "evaluate", *words, "--out", str(out)))
    lines = [line | {"context_tokens": 0} for line in jsonl.read(out)]  # one row for prompts of every length
    (row,) = summarize(lines)
    print(cell, {name: row[name] for name in SHOWN}, flush=True)
    return {name: row[name] for name in ("prompts", "new_tokens", "rounds", *SHOWN)}, lines


def main() -> None:
    """Measure each cell, compare with ours, write."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M's EAGLE-3 draft through llama.cpp and OpenVINO.")
    parser.add_argument("--prompts", type=int, default=40)
    settings = SETTINGS | {"prompts": parser.parse_args().prompts}
    WORK.mkdir(parents=True, exist_ok=True)
    description = machine.describe(("torch", "transformers"))
    found = {cell: measure(cell, settings) for cell in CELLS}
    ours, own_lines = found["longspec"]
    between = {
        cell: apart(lines, own_lines, ours["acceptance_length"]) for cell, (_, lines) in found.items() if lines is not own_lines
    }
    raw = json.loads(Path(f"data/raw/{DATA}/manifest.json").read_text(encoding="utf-8"))
    settings |= {"precision": PRECISION, "threads": THREADS, "run": RUN, "trained_questions": raw["records"]["train"]}
    cells = {cell: row for cell, (row, _) in found.items()}
    machine.write("real_llm_engines", {"machine": description, "settings": settings, "engines": cells, "apart": between})
    print(json.dumps(between))


if __name__ == "__main__":
    main()
