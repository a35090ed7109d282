"""Measure a drafter on held-out prompts: acceptance, speed, losslessness. `python -m longspec.evaluate --help`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspec import jsonl
from longspec.artefact import read_json
from longspec.config import Recipe, load
from longspec.decode.drafters import Drafter, LookupDrafter
from longspec.decode.glide_drafter import GlideDrafter
from longspec.decode.plain import decode_plain
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.distributed import log
from longspec.evaluate.compare import compare
from longspec.evaluate.prompts import Prompt, draw_prompts
from longspec.train.models.glide import GlideLayer, fresh_layer
from longspec.train.models.precision import resolve_dtype
from longspec.train.models.target_states import TargetStates
from longspec.train.models.weights import load_draft_weights

UNTRAINED, LOOKUP = "untrained", "lookup"


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.evaluate", description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON of workflow.yaml: evaluation")
    parser.add_argument("--target", type=Path, required=True, help="target_manifest.json")
    parser.add_argument("--raw", nargs="+", required=True, metavar="NAME=MANIFEST", help="raw manifests of the tasks' data")
    parser.add_argument("--drafter", required=True, help=f"{UNTRAINED} | {LOOKUP} | a stage's name")
    parser.add_argument("--draft", type=Path, help="the stage's draft folder")
    parser.add_argument("--recipe", type=Path, required=True, help="the stage's recipe.yaml (its draft settings and seed)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a prompt")
    return parser.parse_args()


def draft_layer(options: argparse.Namespace, target: Any, recipe: Any) -> GlideLayer:
    """The draft to measure: trained weights, or fresh ones of the recipe's seed."""
    torch.manual_seed(recipe.seed)
    layer = fresh_layer(TargetStates(target), final_norm=recipe.draft.final_norm).to(target.device)
    if options.drafter != UNTRAINED:
        if options.draft is None:
            raise ValueError(f"--drafter {options.drafter} needs --draft, the stage's draft folder")
        load_draft_weights(layer, options.draft)
    return layer.eval()


def all_prompts(options: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    """The prompts of every task."""
    settings, raw = options.settings, dict(entry.split("=", 1) for entry in options.raw)
    prompts = []
    for task, choice in settings["tasks"].items():
        manifest = Path(raw[choice["data"]])
        prompts += draw_prompts(task, manifest, tuple(choice["context"]), settings["prompts"], tokenizer, settings["seed"])
    return prompts


def measure(target: Any, drafter: Drafter, prompt: Prompt, settings: dict[str, Any], eos: int) -> dict[str, Any]:
    """One prompt, decoded plainly and with drafts in turn; its line of the results."""
    start, most = prefill(target, [prompt.ids]), settings["new_tokens"] + 1  # the prompt's forward brings the first
    plain = decode_plain(target, start, most, eos)
    decoded = speculate(target, drafter, start, max_new_tokens=most, shape=settings["draft_tokens"], eos=eos)
    (fast,) = decoded.rows
    verdict = compare(plain, fast.ids)
    return {
        "task": prompt.task,
        "prompt": prompt.number,
        "record": prompt.record,
        "context_tokens": len(prompt.ids),
        "new_tokens": fast.new_tokens,
        "rounds": fast.rounds,
        "accepted": fast.accepted,
        "acceptance_length": fast.new_tokens / max(1, fast.rounds),
        **vars(verdict),
        # Of as many tokens: the last round may bring more than were asked for.
        "seconds_plain": plain.seconds / max(1, len(plain.ids) - 1) * fast.new_tokens,
        "seconds_speculative": decoded.seconds,
        "seconds_draft": decoded.seconds_draft,
        "seconds_target": decoded.seconds_target,
    }


def evaluate(options: argparse.Namespace) -> None:
    """Every prompt of every task. Raises ValueError when the output is not the target's own."""
    path, recipe = read_json(options.target)["path"], load(options.recipe, Recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = AutoModelForCausalLM.from_pretrained(path, dtype=resolve_dtype(recipe.precision)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    layer = None if options.drafter == LOOKUP else draft_layer(options, target, recipe)
    prompts = all_prompts(options, tokenizer)
    log(f"{options.drafter}: {len(prompts)} prompts, {target.dtype}, {device}")
    lines = []
    for prompt in [prompts[0], *prompts]:  # the first one twice: its first times are those of a cold start
        drafter = LookupDrafter() if layer is None else GlideDrafter(target, layer, recipe.draft.window)
        line = measure(target, drafter, prompt, options.settings, tokenizer.eos_token_id)
        lines.append({"drafter": options.drafter, **line})
    del lines[0]
    refuse_faults(lines)
    jsonl.write(options.out, lines)
    for task in options.settings["tasks"]:
        own = [line for line in lines if line["task"] == task]
        rounds = sum(line["rounds"] for line in own)
        log(f"{task}: acceptance length {sum(line['new_tokens'] for line in own) / max(1, rounds):.3f} in {rounds} rounds")


def refuse_faults(lines: list[dict[str, Any]]) -> None:
    """Raise ValueError when any text differs from plain decoding by more than a near-tie."""
    faults = [line for line in lines if line["mismatches"] > line["near_ties"]]
    if faults:
        first = faults[0]
        raise ValueError(
            f"{len(faults)} of {len(lines)} prompts gave other tokens than plain decoding, first "
            f"{first['task']} {first['prompt']} at token {first['tokens_compared']}: decoding is not lossless"
        )


def main() -> None:
    """Run, with a user's mistake told in one line."""
    try:
        evaluate(read_arguments())
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
