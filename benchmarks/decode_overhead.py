"""What decoding costs beside the models, and what is left of the accepted length: python benchmarks/decode_overhead.py

A target with random layers, wide and deep enough to cost more than ten drafts, and a real draft layer whose proposals are
overwritten so that a known number of them is kept in each round: 0, 1, .. depth in turn. All that a round does is done; only
how well the draft guesses is forced. For that the target's text must be known: by its head and embeddings the target counts.
Plain decoding and decoding with the draft take turns in one process on one core; medians of repeats.

* ratio: tokens per second with the draft, against plain decoding; bar: at least 0.6 times the accepted length (chains)
* outside: share of a round spent outside the forwards of target and draft (choosing nodes, growing trees, following the target
  down, moving caches, text on the host); bar: below 0.1 (chains and trees)

In bfloat16, where reading the weights is what a forward of few tokens takes, as on a GPU; in float32 a CPU computes five tokens
in nearly twice the time of one. A tree's ratio has no bar here: `nodes_cost` says how many times one token its 69 nodes cost.
"""

import time
from statistics import median
from typing import Any

import machine
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from longspec.decode.autoregressive import decode_plain
from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import DEFAULT_SHAPE, Levels
from longspec.decode.prefill import Prefilled, prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import NOTHING, DraftTree
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.layer import GlideLayer

TARGET = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
DTYPE = torch.bfloat16
PROMPT, NEW, REPEATS, WINDOW, NO_EOS = 600, 121, 5, 512, -1
SHAPES: dict[str, int | Levels] = {"chain": 4, "tree": DEFAULT_SHAPE}
PARTS = ("seconds", "seconds_draft", "seconds_target")
LEAST_OF_TAU, MOST_OUTSIDE, LEAST_COST = 0.6, 0.1, 10


class Forced(Drafter):
    """Drafts as ever; then the deepest node's path is right for as many tokens as are to be kept, and all else is wrong."""

    target: Any
    round = 0

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """One row."""
        tree = super().propose(draft_input, levels, sampler)
        kept = self.round % (tree.depth + 1)
        self.round += 1
        path = tree.seen_BSS[0, -1].nonzero()[1:, 0]
        tree.tokens_BS[0, 1:] = NOTHING
        right_K = draft_input.roots_B + 1 + torch.arange(kept, device=path.device)
        tree.tokens_BS[0, path[:kept]] = right_K % self.target.config.vocab_size
        return tree


class ForcedDrafter(Forced, GlideDrafter):
    """GLIDE's."""


class ForwardTime:
    """Seconds within outermost forwards of these modules."""

    def __init__(self, *modules: nn.Module) -> None:
        self.seconds, self.depth, self.began = 0.0, 0, 0.0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self.depth += 1
        if self.depth == 1:
            self.began = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.seconds += time.perf_counter() - self.began


def make() -> tuple[Any, GlideLayer]:
    """A target that counts: layers hardly turn what the embedding says, and the head takes it for the token one less."""
    torch.manual_seed(0)
    config = Qwen2Config(**TARGET, tie_word_embeddings=False)
    target = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    torch.nn.init.normal_(target.model.embed_tokens.weight)
    target.lm_head.weight.copy_(target.model.embed_tokens.weight.roll(1, dims=0))
    return target, GlideLayer(config).to(DTYPE).eval()


def forward_seconds(target: Any, start: Prefilled, tokens: int) -> float:
    """One forward of the target over so many new tokens, at the prompt's end."""
    ids_BS, times = torch.ones(1, tokens, dtype=torch.int64), []
    for _ in range(9):
        with start.lent(tokens) as lent:
            began = time.perf_counter()
            target(ids_BS, past_key_values=lent.cache, use_cache=True)
            times.append(time.perf_counter() - began)
    return median(times)


def draft_seconds(target: Any, layer: GlideLayer, start: Prefilled) -> float:
    """One forward of the draft over one token, its head included."""
    (prompt,), last, times = start.prompts, start.cache.layers[-1], []
    length = len(prompt) - 1
    lengths_B, root_B = torch.tensor([length]), torch.tensor(prompt[-1:])
    drafter = GlideDrafter(target, layer, WINDOW)
    draft_input = DraftInput(
        [prompt],
        (length,),
        lengths_B,
        root_B,
        dict(zip(drafter.reads, (last.keys[:, :, :-1], last.values[:, :, :-1]), strict=True)),
    )
    drafter.begin([prompt[:-1]], {})
    for depth in (1, 2) * 9:
        began = time.perf_counter()
        drafter.propose(draft_input, (1,) * depth, Sampler())
        times.append(time.perf_counter() - began)
    return median(times[1::2]) - median(times[::2])


def measure(target: Any, layer: GlideLayer, forwards: ForwardTime, start: Prefilled, shape: int | Levels) -> dict[str, Any]:
    """Plain decoding and decoding with the draft in turn; the first pair warms up."""
    ratios, outside, seconds = [], [], []
    for _ in range(REPEATS + 1):
        plain, before = decode_plain(target, start, NEW, NO_EOS), forwards.seconds
        decoded = speculate(target, ForcedDrafter(target, layer, WINDOW), start, max_new_tokens=NEW, shape=shape)
        inside, (row,) = forwards.seconds - before, decoded.rows
        assert row.ids == plain.ids == [(plain.ids[0] + place) % TARGET["vocab_size"] for place in range(NEW)]
        # Of as many tokens: the last round may bring more than were asked for.
        ratios.append(plain.seconds / (NEW - 1) * row.new_tokens / decoded.seconds)
        outside.append(1 - inside / decoded.seconds)
        seconds.append({"plain": plain.seconds, **{name: getattr(decoded, name) for name in PARTS}})
    depth = shape if isinstance(shape, int) else len(shape)
    assert row.accepted[: depth + 1] == list(range(depth + 1)), "not the pattern that was to be forced"
    tau = row.new_tokens / row.rounds
    middle = {name: round(median(entry[name] for entry in seconds[1:]), 4) for name in seconds[0]}
    numbers = {"tau": tau, "rounds": row.rounds, "ratio": median(ratios[1:]), "outside": median(outside[1:])}
    return {name: round(x, 4) for name, x in (numbers | {"ratio_of_tau": numbers["ratio"] / tau}).items()} | {"seconds": middle}


@torch.inference_mode()
def main() -> None:
    """Measure, hold against the bars, write."""
    torch.set_num_threads(1)
    (target, layer), description = make(), machine.describe(("torch", "transformers"))
    reads = ForcedDrafter(target, layer, WINDOW).reads
    start = prefill(target, [torch.randint(0, TARGET["vocab_size"], (PROMPT,)).tolist()], reads=reads)
    one, nodes = (forward_seconds(target, start, tokens) for tokens in (1, 1 + sum(DEFAULT_SHAPE)))
    cost = {"target_over_draft": one / draft_seconds(target, layer, start), "nodes_cost": nodes / one}
    modules = (target, layer, target.lm_head, target.model.embed_tokens, target.model.rotary_emb, layer.input_layernorm)
    forwards = ForwardTime(*modules, layer.self_attn.k_proj, layer.self_attn.v_proj)
    shapes = {name: measure(target, layer, forwards, start, shape) for name, shape in SHAPES.items()}
    holds = {
        "target_over_draft": cost["target_over_draft"] >= LEAST_COST,
        "ratio": shapes["chain"]["ratio_of_tau"] >= LEAST_OF_TAU,
        "outside": all(entry["outside"] < MOST_OUTSIDE for entry in shapes.values()),
    }
    cost = {name: round(x, 2) for name, x in cost.items()}
    settings = {"target": TARGET, "prompt": PROMPT, "tokens": NEW - 1, "threads": 1, "dtype": str(DTYPE)}
    machine.write("decode_overhead", {"machine": description, "settings": settings, **cost, **shapes, "holds": holds})
    for name, entry in shapes.items():
        print(name, {key: entry[key] for key in ("tau", "ratio", "ratio_of_tau", "outside")})
    print(cost, holds)


if __name__ == "__main__":
    main()
