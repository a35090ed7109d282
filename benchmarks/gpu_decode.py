"""Decoding with a draft of each method against plain decoding, on one GPU, beside a random target of Qwen2.5-7B's shape.

    python benchmarks/gpu_decode.py           prompts of 512, 4,096 and 16,384 tokens
    python benchmarks/gpu_decode.py --tiny    a toy shape on any machine, to prove that the script works

What the draft guesses is overwritten, so that 0, 1, .. 4 of its tokens are kept in turn, three tokens a round; all that a round
does is done (benchmarks/decode_overhead.py). Plain decoding takes turns with it in one process; medians of three pairs. Of each
method and prompt: milliseconds a plain token and a round, tokens a second of both, their ratio, and the milliseconds in which
the weights can be read once, which is the floor of a plain token. Kept in gpu_decode.jsonl, a line for each: a second call
measures what is missing in it.
"""

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.cells import fill
from benchmarks.decode_overhead import NO_EOS, Forced
from benchmarks.gpu_steps import SHAPES, build_target, here, measured_rates, method_of, options_of, recipe_of
from longspec import methods
from longspec.decode.autoregressive import decode_plain
from longspec.decode.drafters import Drafter
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate

PROMPTS, TINY_PROMPTS = (512, 4096, 16_384), (64, 128)
CHAIN = 4
TURNS, TINY_TURNS = (121, 3), (31, 1)  # tokens of a text, and pairs behind the one that warms up


def let_it_count(target: Any) -> None:
    """Turn a random target into one that continues n by n + 1: its layers do their work and add nothing."""
    embedding = target.model.embed_tokens.weight
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    torch.nn.init.normal_(embedding)
    target.lm_head.weight.copy_(embedding.roll(1, dims=0))


def forced_drafter(target: Any, method: str) -> Drafter:
    """Return the drafter of a random draft, forced."""
    recipe, _ = recipe_of(method, 1024, target.config.vocab_size)
    chosen, settings = method_of(recipe, target.config.vocab_size)
    layer = chosen.layer(target.config, settings).to(target.device, target.dtype).eval()
    drafter = methods.drafter(method, target, layer, settings)
    drafter.__class__ = type("ForcedDrafter", (Forced, type(drafter)), {})
    return drafter


def measure(target: Any, method: str, length: int, floor: float, new: int, repeats: int) -> dict[str, Any]:
    """Return the numbers of one prompt."""
    vocabulary, drafter = target.config.vocab_size, forced_drafter(target, method)
    start = prefill(target, [torch.randint(0, vocabulary, (length,)).tolist()], reads=drafter.reads)
    plain_seconds, draft_seconds = [], []
    for _ in range(repeats + 1):  # the first pair warms up
        plain = decode_plain(target, start, new, NO_EOS)
        decoded = speculate(target, drafter, start, max_new_tokens=new, shape=CHAIN)
        (row,) = decoded.rows
        counted = [(plain.ids[0] + place) % vocabulary for place in range(new)]
        assert row.ids == plain.ids == counted, "the text is not the target's own"
        plain_seconds.append(plain.seconds / (new - 1))
        draft_seconds.append(decoded.seconds / row.rounds)
    token, a_round = median(plain_seconds[1:]), median(draft_seconds[1:])
    kept = row.new_tokens / row.rounds
    return {
        "plain_ms": 1e3 * token,
        "floor_ms": 1e3 * floor,
        "round_ms": 1e3 * a_round,
        "round_over_plain": a_round / token,
        "tokens_a_round": kept,
        "plain_tokens_per_second": 1 / token,
        "draft_tokens_per_second": kept / a_round,
        "ratio": kept * token / a_round,
    }


@torch.inference_mode()
def main() -> None:
    """Measure every method at every prompt and keep the result."""
    options, device = options_of(__doc__)
    target = build_target(SHAPES[options.shape], device, torch.bfloat16)
    target.set_attn_implementation("sdpa")
    let_it_count(target)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in target.parameters())
    weights -= target.model.embed_tokens.weight.numel() * 2  # of which a token reads one row
    floor = weights / measured_rates(device, torch.bfloat16)["bytes"]
    prompts = options.lengths or (TINY_PROMPTS if options.tiny else PROMPTS)
    turns = TINY_TURNS if options.tiny else TURNS
    wanted = [here(device, options.shape) | {"prompt": n, "method": name} for n in prompts for name in methods.names()]
    fill(options.out / "gpu_decode.jsonl", wanted, lambda cell: measure(target, cell["method"], cell["prompt"], floor, *turns))


if __name__ == "__main__":
    main()
