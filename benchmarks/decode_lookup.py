"""Prompt lookup beside transformers' own: python benchmarks/decode_lookup.py

Both decode the same texts greedily with chains of the same length, in turns in one process on one core, by their `generate`.
The target has the shape of SmolLM2-135M and random weights, but by its head and embeddings it counts, and prompts hold runs of
what it will say, so that chains are kept now whole, now in part, now not at all.

* outside: milliseconds outside the target's forwards for each forward (the whole call, less the time within them), ours against
  transformers'; the median of the ratios of single calls; bar: at most 1.0
* long: milliseconds of a round of ours outside the forward at 32,768 tokens of text against 1,024, on a target of one narrow
  layer; the difference of the medians; bar: at most 1 ms. Before the first round the prompt is taken in, once: `begin`

By the clock (`wall`) and by what the process had of the cores (`cpu`), which says more where something else is running.
"""

import time
from statistics import median
from typing import Any

import machine
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from longspec.decode.generate import generate
from longspec.decode.lookup import LookupDrafter
from longspec.decode.speculate import speculate

TARGET = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 40_000,
}
NARROW = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
PROMPT, PROMPTS, NEW, CHAIN, NGRAM, REPEATS = 300, 3, 64, 10, 3, 7
SHORT, LONG = 1024, 32_768
RUN = 6  # tokens of a run, on average
MOST_RATIO, MOST_ADDED_MS = 1.0, 1.0
WAYS = ("ours", "transformers")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Times = dict[str, float]


class Outside:
    """Milliseconds outside the forwards of a target, by each clock, since the last look; and how many forwards there were."""

    def __init__(self, target: Any) -> None:
        self.count, self.times = 0, {name: -clock() for name, clock in CLOCKS.items()}
        target.register_forward_pre_hook(lambda *_: self._add(1))
        target.register_forward_hook(lambda *_: self._add(-1))

    def _add(self, sign: int) -> None:
        self.count += sign == 1
        for name, clock in CLOCKS.items():
            self.times[name] += sign * clock()

    def look(self) -> tuple[int, Times]:
        """And begin anew."""
        found = self.count, {name: 1000 * (self.times[name] + clock()) for name, clock in CLOCKS.items()}
        self.count, self.times = 0, {name: -clock() for name, clock in CLOCKS.items()}
        return found


def make(**shape: int) -> tuple[Any, Outside]:
    """A target that says after each token the one that counts one more, and what watches its forwards."""
    torch.manual_seed(0)
    config = LlamaConfig(**TARGET | shape, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.nn.init.normal_(target.model.embed_tokens.weight)
    target.lm_head.weight.copy_(target.model.embed_tokens.weight.roll(1, dims=0))
    return target, Outside(target)


def make_prompt(length: int) -> torch.Tensor:
    """[1, T]: tokens at random, then the numbers that follow the last token, in runs that are shuffled, then that token."""
    half = TARGET["vocab_size"] // 2
    last = torch.randint(0, half - 2 * NEW, (1,))
    said = last + torch.arange(NEW + CHAIN)
    runs = said.tensor_split(torch.randperm(len(said))[: len(said) // RUN].sort().values)
    shuffled = torch.cat([runs[place] for place in torch.randperm(len(runs))])
    before = torch.randint(half, TARGET["vocab_size"], (length - len(said) - 1,))
    return torch.cat([before, shuffled, last])[None]


def call(target: Any, outside: Outside, way: str, ids_BT: torch.Tensor) -> tuple[list[int], int, Times]:
    """The text, how many forwards it took, and milliseconds outside of them for each."""
    settings = {"attention_mask": torch.ones_like(ids_BT), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    outside.look()
    if way == "ours":
        text_BT = generate(target, ids_BT, draft=LookupDrafter(), shape=CHAIN, **settings)
    else:
        text_BT = target.generate(ids_BT, prompt_lookup_num_tokens=CHAIN, max_matching_ngram_size=NGRAM, **settings)
    count, times = outside.look()
    return text_BT[0].tolist(), count, {name: milliseconds / count for name, milliseconds in times.items()}


def beside_transformers() -> dict[str, Any]:
    """Both ways in turn over the prompts; the first turn warms up."""
    target, outside = make()
    prompts = [make_prompt(PROMPT) for _ in range(PROMPTS)]
    found: dict[str, list[tuple[list[int], int, Times]]] = {way: [] for way in WAYS}
    for repeat in range(REPEATS + 1):
        for ids_BT in prompts:
            for way in WAYS if repeat % 2 else WAYS[::-1]:
                found[way].append(call(target, outside, way, ids_BT))
    pairs = list(zip(*(calls[PROMPTS:] for calls in found.values()), strict=True))
    assert all(ours[0] == theirs[0] for ours, theirs in pairs), "not the same text"
    return {
        "tokens_per_forward": round(NEW * len(pairs) / sum(count for (_, count, _), _ in pairs), 2),
        "ratio": {name: round(median(ours[2][name] / theirs[2][name] for ours, theirs in pairs), 3) for name in CLOCKS},
        "milliseconds": {way: _medians([times for _, _, times in calls[PROMPTS:]]) for way, calls in found.items()},
    }


def rounds(target: Any, outside: Outside, prompt: list[int]) -> tuple[Times, Times]:
    """Milliseconds outside the forwards: before the first token, and of each round."""
    looks = []
    outside.look()
    settings = {"max_new_tokens": NEW, "shape": CHAIN, "on_tokens": lambda *_: looks.append(outside.look())}
    speculate(target, LookupDrafter(), [prompt], **settings)
    (_, begin), *each = looks
    return begin, {name: sum(times[name] for _, times in each) / len(each) for name in CLOCKS}


def by_length() -> dict[str, Any]:
    """Both lengths of text in turn; the first turn warms up."""
    target, outside = make(**NARROW)
    prompts = {length: make_prompt(length)[0].tolist() for length in (SHORT, LONG)}
    found: dict[int, list[tuple[Times, Times]]] = {length: [] for length in prompts}
    for _ in range(REPEATS + 1):
        for length, prompt in prompts.items():
            found[length].append(rounds(target, outside, prompt))
    (begin, short), (long_begin, long) = ([_medians(list(t)) for t in zip(*found[n][1:], strict=True)] for n in (SHORT, LONG))
    added = {name: round(long[name] - short[name], 3) for name in CLOCKS}
    return {"short": {"begin": begin, "round": short}, "long": {"begin": long_begin, "round": long}, "added": added}


def _medians(times: list[Times]) -> Times:
    return {name: round(median(each[name] for each in times), 3) for name in CLOCKS}


@torch.inference_mode()
def main() -> None:
    """Measure, hold against the bars, write."""
    torch.set_num_threads(1)
    description = machine.describe(("torch", "transformers"))
    beside, lengths = beside_transformers(), by_length()
    holds = {"outside": beside["ratio"]["wall"] <= MOST_RATIO, "long": lengths["added"]["wall"] <= MOST_ADDED_MS}
    settings = {"target": TARGET, "prompt": PROMPT, "prompts": PROMPTS, "tokens": NEW, "chain": CHAIN, "ngram": NGRAM}
    numbers = {"machine": description, "settings": settings, "outside": beside, "long": lengths, "holds": holds}
    machine.write("decode_lookup", numbers)
    print(beside, lengths, holds)


if __name__ == "__main__":
    main()
