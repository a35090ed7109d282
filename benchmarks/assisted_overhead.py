"""What a round costs beside the models, ours and transformers' own: python benchmarks/assisted_overhead.py [target's folder]

Four ways to decode the same prompts greedily, in turns in one process, each by its `generate`:

* ours with a GLIDE draft, and transformers' assisted generation (`assistant_model`), whose assistant has one layer of the
  target's kind: chains of the same length, both of fresh weights
* prompt lookup, ours and transformers' (`prompt_lookup_num_tokens`): the prompts repeat themselves

`outside`: milliseconds of the whole call outside forwards of target, draft and assistant, for each forward of the target; the
median over calls. A forward of our draft is from a level's tokens to its logits, embedding, keys and masks included, as in the
assistant's. Bar, of each pair: at most 1.0 times transformers'. By the clock (`wall`) and by what the process had of the cores
(`cpu`), which says more where something else is running. Default: the demo's target (`make demo` first); float32, and threads
as torch has them (OMP_NUM_THREADS).
"""

import sys
import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from typing import Any

import machine
import torch
from transformers import AutoModelForCausalLM

from longspec.decode.generate import generate
from longspec.decode.lookup import LookupDrafter
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.layer import GlideLayer
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config

DEMO = "models/demo/target"
PROMPT, PROMPTS, NEW, CHAIN, NGRAM, WINDOW, REPEATS = 256, 2, 32, 4, 3, 512, 5
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PAIRS = {"draft": ("ours", "assisted"), "lookup": ("our lookup", "prompt lookup")}
MOST_RATIO = 1.0
Function = Callable[..., Any]


class Inside:
    """Seconds within outermost calls of what is watched, by each clock, and how many calls of the target there were."""

    def __init__(self) -> None:
        self.depth = 0
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.rounds, self.seconds = 0, dict.fromkeys(CLOCKS, 0.0)

    def enter(self) -> None:
        """A watched call begins."""
        self._move(1)

    def leave(self) -> None:
        """A watched call ends."""
        self._move(-1)

    def _move(self, sign: int) -> None:
        outermost = self.depth == (sign < 0)
        self.depth += sign
        if outermost:
            for name, clock in CLOCKS.items():
                self.seconds[name] -= sign * clock()

    def watch_call(self, owner: Any, name: str) -> None:
        """Time a method."""
        call = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            self.enter()
            try:
                return call(*arguments, **named)
            finally:
                self.leave()

        setattr(owner, name, run)

    def watch_model(self, model: Any, *, is_round: bool = False) -> None:
        """Time its forwards, those of its twins too, which hold its hooks."""

        def enter(*_: Any) -> None:
            self.rounds += is_round
            self.enter()

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(lambda *_: self.leave())


def make(folder: str, inside: Inside) -> dict[str, Function]:
    """The four ways, from a prompt [1, T] to its text."""
    torch.manual_seed(0)
    target = load_target(folder, read_target_config(folder), torch.float32)
    small = deepcopy(target.config)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    assistant = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
    own = assistant.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule, own.assistant_confidence_threshold = CHAIN, "constant", 0.0
    drafter = GlideDrafter(target, GlideLayer(target.config).eval(), WINDOW)
    inside.watch_model(target, is_round=True)
    inside.watch_model(assistant)
    for name in ("logits", "_take_in", "begin"):
        inside.watch_call(drafter, name)
    lookup = LookupDrafter()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return {
        "ours": lambda **ids: generate(target, **ids, draft=drafter, shape=CHAIN, **settings),
        "assisted": lambda **ids: target.generate(**ids, assistant_model=assistant, **settings),
        "our lookup": lambda **ids: generate(target, **ids, draft=lookup, shape=CHAIN, **settings),
        "prompt lookup": lambda **ids: target.generate(
            **ids, prompt_lookup_num_tokens=CHAIN, max_matching_ngram_size=NGRAM, **settings
        ),
        "plain": lambda **ids: target.generate(**ids, **settings),
    }


def measure(inside: Inside, way: Function, ids_BT: torch.Tensor) -> dict[str, Any]:
    """One call."""
    inside.reset()
    began = {name: clock() for name, clock in CLOCKS.items()}
    text_BT = way(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT))
    seconds = {name: clock() - began[name] for name, clock in CLOCKS.items()}
    outside = {name: 1000 * (seconds[name] - inside.seconds[name]) / inside.rounds for name in CLOCKS}
    return {"text": text_BT[0].tolist(), "rounds": inside.rounds, "outside": outside, "seconds": seconds}


def told(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a way's calls."""
    figures = {
        figure: {name: round(median(call[figure][name] for call in calls), 4) for name in CLOCKS}
        for figure in ("outside", "seconds")
    }
    return figures | {"tokens_per_forward": round(NEW * len(calls) / sum(call["rounds"] for call in calls), 2)}


@torch.inference_mode()
def main() -> None:
    """Measure, hold against the bars, write."""
    folder = (sys.argv[1:] or [DEMO])[0]
    inside, description = Inside(), machine.describe(("torch", "transformers"))
    ways = make(folder, inside)
    config = read_target_config(folder)
    prompts = [torch.randint(0, config.vocab_size, (1, PROMPT // 4)).repeat(1, 4) for _ in range(PROMPTS)]
    calls: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for ids_BT in prompts:
            for name in list(ways) if repeat % 2 else list(ways)[::-1]:
                calls[name].append(measure(inside, ways[name], ids_BT))
    found = {name: told(each[PROMPTS:]) for name, each in calls.items()}  # the first turn warms up
    texts = {name: [call["text"] for call in each] for name, each in calls.items()}
    ratios = {
        pair: {name: round(found[ours]["outside"][name] / found[theirs]["outside"][name], 3) for name in CLOCKS}
        for pair, (ours, theirs) in PAIRS.items()
    }
    holds = {pair: ratio["wall"] <= MOST_RATIO for pair, ratio in ratios.items()}
    holds["same text"] = all(each == texts["plain"] for each in texts.values())
    target = {name: getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    shape = {
        "target": target,
        "prompt": PROMPT,
        "prompts": PROMPTS,
        "tokens": NEW,
        "chain": CHAIN,
        "threads": torch.get_num_threads(),
    }
    machine.write(
        "assisted_overhead", {"machine": description, "settings": shape, "ways": found, "ratios": ratios, "holds": holds}
    )
    for name, row in found.items():
        print(name, row)
    print(ratios, holds)


if __name__ == "__main__":
    main()
