"""Drafts for SmolLM2-135M-Instruct against transformers' own decoding: python benchmarks/real_llm.py [run ...]

After `make smollm2` (default run: smollm2-eagle3; several runs: each one's draft). Whole questions on held-out modules, other
draws than the report's, greedy, one at a time on two threads, each way by its `generate`, in turns in one process:

* plain: transformers' `generate`
* transformers' prompt lookup (`prompt_lookup_num_tokens`), and ours
* each run's final draft, alone and with prompt lookup beside it, by the shape that our `generate` chooses, and by trees of
  sixteen by a budget

Seconds are those behind the prompt's forward; `whole`: of whole calls. speed: tokens a second over those of plain decoding.
acceptance_length: tokens for each forward of the target after the prompt's; intervals over questions, paired. 48 questions in
bfloat16 where the processor has instructions for it, where texts may part at a near-tie; 8 in float32, where every token is
held against plain decoding: a difference that is no near-tie is a fault. Bars in the faster dtype: a draft alone, by one shape,
3.0 tokens a round and 1.8 times plain decoding's speed; with lookup 2.1 times.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from transformers import AutoTokenizer

from longspec.atomic_files import read_json
from longspec.decode import chain_costs
from longspec.decode.autoregressive import near_tie_margin
from longspec.decode.generate import generate, load_drafter
from longspec.decode.levels import Budget, Shape
from longspec.decode.lookup import LookupDrafter
from longspec.measure.estimates import estimate
from longspec.measure.lines import judge
from longspec.measure.prompts import draw_prompts
from longspec.measure.tasks import HeldOut
from longspec.models.target import load_target, resolve_dtype
from longspec.models.target_config import read_target_config

TARGET = Path("models/smollm2-135m/target_manifest.json")
QUESTIONS = Path("data/raw/smollm2-questions/manifest.json")
PROMPTS, EXACT, CONTEXT, NEW, REPEATS, SEED, THREADS, LOOKUP, BESIDE = 48, 8, (16, 1280), 96, 1, 1, 2, 10, 8
LEAST_ACCEPTANCE, LEAST_SPEED, LEAST_WITH_LOOKUP = 3.0, 1.8, 2.1
Way = Callable[..., torch.Tensor]
chain_costs.OF_AN_HOUR = float("inf")  # measured once, before what is timed


def make_ways(target: Any, drafts: dict[str, Path], end: int) -> dict[str, Way]:
    """Each way to decode, from a prompt [1, T] to prompt and text."""
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": end}
    drafters = {name: load_drafter(target, folder) for name, folder in drafts.items()}
    lookup, tree = LookupDrafter(), Budget(16)

    def drafting(drafter: Any, shape: Shape | None, copied: int | None = None) -> Way:
        return lambda **ids: generate(target, **ids, draft=drafter, shape=shape, prompt_lookup_num_tokens=copied, **settings)

    return {
        "plain": lambda **ids: target.generate(**ids, **settings),
        "transformers' lookup": lambda **ids: target.generate(**ids, prompt_lookup_num_tokens=LOOKUP, **settings),
        "our lookup": drafting(lookup, LOOKUP),
        **{name: drafting(drafter, None) for name, drafter in drafters.items()},
        **{f"{name} and our lookup": drafting(drafter, None, BESIDE) for name, drafter in drafters.items()},
        **{f"{name}, tree": drafting(drafter, tree) for name, drafter in drafters.items()},
        **{f"{name}, tree and our lookup": drafting(drafter, tree, BESIDE) for name, drafter in drafters.items()},
    }


class Forwards:
    """How many forwards a target has made, and when the first one ended."""

    def __init__(self, target: Any) -> None:
        self.count, self.first_end = 0, 0.0
        target.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1
        if self.count == 1:
            self.first_end = time.perf_counter()


def call(way: Way, forwards: Forwards, ids_BT: torch.Tensor) -> dict[str, Any]:
    """One call: its tokens after the prompt, forwards after the prompt's, seconds."""
    forwards.count, began = 0, time.perf_counter()
    text_BT = way(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT))
    end, text = time.perf_counter(), text_BT[0, ids_BT.shape[1] :].tolist()
    return {"text": text, "rounds": forwards.count - 1, "seconds": end - forwards.first_end, "whole": end - began}


def told(calls: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Figures of a way, from each prompt's repeats and plain decoding's of the same prompts."""
    tokens, of_plain = ([len(repeats[0]["text"]) for repeats in each] for each in (calls, plain))
    rounds = [repeats[0]["rounds"] for repeats in calls]

    def speed(name: str) -> tuple[list[float], list[float]]:
        """Seconds of as many tokens by plain decoding, and seconds; of each question."""
        own, by_plain = ([median(one[name] for one in repeats) for repeats in each] for each in (calls, plain))
        return [taken * one / other for taken, one, other in zip(by_plain, tokens, of_plain, strict=True)], own

    return {
        "tokens": sum(tokens),
        "acceptance_length": rounded(estimate(([each - 1 for each in tokens], rounds))),
        "tokens_a_second": round(sum(tokens) / sum(speed("seconds")[1]), 2),
        "speed": rounded(estimate(speed("seconds"))),
        "speed_whole": rounded(estimate(speed("whole"))),
    }


def rounded(found: dict[str, float]) -> dict[str, float]:
    """An estimate to three digits behind the point."""
    return {name: round(value, 3) for name, value in found.items()}


def measure(dtype: torch.dtype, drafts: dict[str, Path], count: int, repeats: int) -> dict[str, Any]:
    """All ways in a dtype, and how their texts compare with plain decoding's."""
    path = read_json(TARGET)["path"]
    target: Any = load_target(path, read_target_config(path), dtype)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    prompts = draw_prompts("held out", HeldOut("", CONTEXT, NEW, whole_questions=True), QUESTIONS, PROMPTS, tokenizer, SEED)[
        :count
    ]
    prompts_BT = [torch.tensor([prompt.ids]) for prompt in prompts]
    ways, forwards = make_ways(target, drafts, tokenizer.eos_token_id), Forwards(target)
    # Warm: `generate` measures what rounds cost when it first meets a text of its length, up to the next power of two.
    for ids_BT in {ids_BT.shape[1].bit_length(): ids_BT for ids_BT in prompts_BT}.values():
        for way in ways.values():
            call(way, forwards, ids_BT)
    calls: dict[str, list[list[dict[str, Any]]]] = {name: [[] for _ in prompts] for name in ways}
    for repeat in range(repeats):
        for number, ids_BT in enumerate(prompts_BT):
            for name in list(ways) if repeat % 2 else list(ways)[::-1]:
                calls[name][number].append(call(ways[name], forwards, ids_BT))
    rows = {name: told(each, calls["plain"]) for name, each in calls.items()}
    for name, row in rows.items():
        row |= differences(target, prompts_BT, calls["plain"], calls[name])
        print(dtype, name, row, flush=True)
    return rows


def differences(target: Any, prompts_BT: list[torch.Tensor], plain: list[Any], other: list[Any]) -> dict[str, Any]:
    """Tokens held against plain decoding's, up to the first difference of each prompt, and what the differences are."""
    verdicts = []
    for ids_BT, (left, *_), (right, *_) in zip(prompts_BT, plain, other, strict=True):

        def gap(place: int, own: int, its: int, ids_BT: torch.Tensor = ids_BT, text: list[int] = left["text"]) -> Any:
            logits_V = target(torch.cat([ids_BT, torch.tensor([text[:place]], dtype=torch.long)], dim=1)).logits[0, -1]
            return float(logits_V[own].float() - logits_V[its].float()), near_tie_margin(logits_V)

        verdicts.append(judge(left["text"], right["text"], gap))
    return {
        "compared": sum(each.tokens_compared for each in verdicts),
        "differences": sum(each.mismatches for each in verdicts),
        "near_ties": sum(each.near_ties for each in verdicts),
        "margins": [[each.margin, each.margin_allowed] for each in verdicts if each.mismatches],
    }


def bars(fast: dict[str, Any], exact: dict[str, Any], runs: tuple[str, ...]) -> dict[str, bool]:
    """Which bars hold; those of a draft alone for one shape together."""
    ours = {name: row for name, row in fast.items() if name.startswith(runs)}
    with_lookup = [row for name, row in ours.items() if name.endswith("lookup")]
    alone = [row for name, row in ours.items() if not name.endswith("lookup")]
    met = [(row["acceptance_length"]["mean"] >= LEAST_ACCEPTANCE, row["speed"]["mean"] >= LEAST_SPEED) for row in alone]
    return {
        "draft alone, by one shape": (True, True) in met,
        "with lookup": max(row["speed"]["mean"] for row in with_lookup) >= LEAST_WITH_LOOKUP,
        "same tokens": all(row["differences"] == row["near_ties"] for row in exact.values()),
    }


def final_draft(run: str) -> Path:
    """The folder of a run's final draft, which must be there."""
    found = sorted(Path("results", run).glob("*/final_draft"))
    if len(found) != 1:
        sys.exit(f"results/{run}: {len(found)} final drafts; `make smollm2 SMOLLM2={run}` makes one")
    return found[0]


@torch.inference_mode()
def main() -> None:
    """Measure, hold against the bars, write."""
    torch.set_num_threads(THREADS)
    drafts = {run: final_draft(run) for run in sys.argv[1:] or ["smollm2-eagle3"]}
    description = machine.describe(("torch", "transformers"))
    fastest = resolve_dtype("fastest")
    found = {str(fastest): measure(fastest, drafts, PROMPTS, REPEATS)}
    if fastest != torch.float32:
        found[str(torch.float32)] = measure(torch.float32, drafts, EXACT, 1)
    holds = bars(found[str(fastest)], found[str(torch.float32)], tuple(drafts))
    shape = {"prompts": PROMPTS, "context": CONTEXT, "tokens": NEW, "repeats": REPEATS, "threads": THREADS, "lookup": LOOKUP}
    machine.write("real_llm", {"machine": description, "settings": shape, "ways": found, "holds": holds})
    print(json.dumps(holds))


if __name__ == "__main__":
    main()
