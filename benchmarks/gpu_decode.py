"""Decoding with a GLIDE draft against plain decoding, on one GPU, beside a random target of Qwen2.5-7B's shape.

    python benchmarks/gpu_decode.py           prompts of 512, 4,096 and 16,384 tokens
    python benchmarks/gpu_decode.py --tiny    a toy shape on any machine, to prove that the script works

What the draft guesses is overwritten, so that 0, 1, .. 4 of its tokens are kept in turn, three tokens a round; all that a round
does is done (benchmarks/decode_overhead.py). Plain decoding takes turns with it in one process; medians of three pairs. Of each
prompt: milliseconds a plain token and a round, tokens a second of both, their ratio, and the milliseconds in which the weights
can be read once, which is the floor of a plain token. Kept in gpu_decode.json.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from decode_overhead import NO_EOS, ForcedDrafter
from gpu_steps import RESULTS, SHAPES, build_target, measured_rates

from longspec.decode.autoregressive import decode_plain
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.methods.glide.layer import GlideLayer

PROMPTS, TINY_PROMPTS = (512, 4096, 16_384), (64, 128)
NEW, REPEATS, WINDOW, CHAIN = 121, 3, 512, 4


def let_it_count(target: Any) -> None:
    """Turn a random target into one that continues n by n + 1: its layers do their work and add nothing."""
    embedding = target.model.embed_tokens.weight
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    torch.nn.init.normal_(embedding)
    target.lm_head.weight.copy_(embedding.roll(1, dims=0))


def measure(target: Any, layer: GlideLayer, length: int, floor: float) -> dict[str, Any]:
    """Return the numbers of one prompt."""
    vocabulary = target.config.vocab_size
    drafter = ForcedDrafter(target, layer, WINDOW)
    start = prefill(target, [torch.randint(0, vocabulary, (length,)).tolist()], reads=drafter.reads)
    plain_seconds, draft_seconds = [], []
    for _ in range(REPEATS + 1):  # the first pair warms up
        plain = decode_plain(target, start, NEW, NO_EOS)
        decoded = speculate(target, drafter, start, max_new_tokens=NEW, shape=CHAIN)
        (row,) = decoded.rows
        counted = [(plain.ids[0] + place) % vocabulary for place in range(NEW)]
        assert row.ids == plain.ids == counted, "the text is not the target's own"
        plain_seconds.append(plain.seconds / (NEW - 1))
        draft_seconds.append(decoded.seconds / row.rounds)
    token, a_round = median(plain_seconds[1:]), median(draft_seconds[1:])
    kept = row.new_tokens / row.rounds
    return {
        "prompt": length,
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
    """Measure every prompt and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a toy shape, nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        sys.exit("no GPU here; --tiny proves on any machine that the script works")
    target = build_target(SHAPES["tiny" if options.tiny else "qwen2.5-7b"], device, torch.bfloat16)
    target.set_attn_implementation("sdpa")
    let_it_count(target)
    layer = GlideLayer(target.config).to(device, torch.bfloat16).eval()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in target.parameters())
    weights -= target.model.embed_tokens.weight.numel() * 2  # of which a token reads one row
    floor = weights / measured_rates(device, torch.bfloat16)["bytes"]
    rows = []
    for length in TINY_PROMPTS if options.tiny else PROMPTS:
        rows.append(measure(target, layer, length, floor))
        print(json.dumps(rows[-1]), flush=True)
    if not options.tiny:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": "qwen2.5-7b", "rows": rows}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_decode.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
