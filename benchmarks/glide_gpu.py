"""Training steps at 32,768 tokens beside targets of published shapes, on one GPU of 141 GB; weights are random.

    python benchmarks/glide_gpu.py                    Qwen2.5-7B and QwQ-32B: fits, tokens/s, model-FLOP utilisation
    python benchmarks/glide_gpu.py --out $OUT         where the numbers go (default benchmarks/results)
    python benchmarks/glide_gpu.py --tiny             a toy shape on any machine, to prove that the script works

A step is the target's forward, the draft's forward and backward, and AdamW in float32 on a float32 copy of the draft's
weights, all on the GPU, with the fastest attention that is there and once with torch's own (sdpa). Utilisation counts the
operations that the formulas need (longspec/train/estimate/flops.py), against what a large bf16 product reaches on this card in
the same run. Kept in glide_gpu.json, which grows row by row.

Shapes: B rows, S tokens.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from longspec.methods.glide.method import METHOD
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, Qwen2Glide
from longspec.models.attention.backends import SDPA, choose
from longspec.models.losses import fused_loss
from longspec.models.target import head_width
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.stopwatch import Stopwatch
from longspec.train.estimate.flops import operations

RESULTS = Path(__file__).parent / "results"
GOAL = 0.5  # of the card's measured bf16 matrix rate
COMMON = {"vocab_size": 152_064, "max_position_embeddings": 65_536, "rope_theta": 1e6, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwq-32b": {
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
# Name, loss, whether the target's own loss is measured, tokens of a chunk of the target.
WAYS = (("hard, no target loss", "hard", False, None), ("hard", "hard", True, None), ("soft", "soft", True, None))
CHUNKED = ("hard, no target loss, chunks of 8192", "hard", False, 8192)


def build(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Glide:
    """A fresh draft beside a random target, made on the device."""
    torch.manual_seed(0)
    config = Qwen2Config(**COMMON | shape)
    with device:
        target = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=STATES_ATTENTION)
    states = TargetStates(target.requires_grad_(False).eval(), attention=choose("auto", device, dtype, head_width(config)))
    return Qwen2Glide(config, "random", draft=Draft(anchors="off", lag_mode="random"), states=states).to(device)


class MasterAdamW:
    """AdamW on float32 copies, as the training engine keeps them."""

    def __init__(self, layer: nn.Module) -> None:
        self.parameters = list(layer.parameters())
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, fused=True)

    def step(self) -> None:
        """One update from the gradients of the layer, which are cleared."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                master.grad = None


def seconds_of(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Mean wall time of a step after one that compiles and warms up."""
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def measure(glide: Glide, way: tuple[str, str, bool, int | None], length: int, steps: int, peak: float) -> dict[str, Any]:
    """One way of training at one length."""
    name, loss, with_llm_loss, chunk = way
    device = next(glide.draft_model.parameters()).device
    glide.draft_settings.loss, glide.states.chunk = loss, chunk
    optimizer = MasterAdamW(glide.draft_model)
    ids_BS = torch.randint(0, glide.config.vocab_size, (1, length), device=device)

    def step() -> None:
        glide(ids_BS, ids_BS, lag=3, with_llm_loss=with_llm_loss).loss.backward()
        optimizer.step()

    seconds = seconds_of(step, steps, device)
    settings, labels = glide.draft_settings, length - 1
    counted = operations(glide.config, METHOD, settings, length, [length], labels, with_llm_loss=with_llm_loss)
    return {
        "way": name,
        "tokens": length,
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "tflops": counted.total / seconds / 1e12,
        "of_measured_rate": counted.total / seconds / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square product on this machine now, the best of some."""
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    # Random numbers: a GPU that multiplies constants draws less power and reaches rates that no training does.
    left = torch.randn((side, side), generator=torch.Generator(device).manual_seed(0), dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        clock = Stopwatch(device)
        left @ left
        clock.mark("product")
        best = min(best, clock.take()["product"])
    return 2.0 * side**3 / best


def main() -> None:
    """Every shape in every way, from the lightest; what does not fit is written down as such."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a toy shape, nothing kept")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        sys.exit("no GPU here; --tiny proves on any machine that the script works")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = 256 if options.tiny else options.length
    peak, rows = measured_peak(device, dtype), list[dict[str, Any]]()
    about = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "liger": fused_loss(device.type) is not None,
        "measured_rate_tflops": peak / 1e12,
        "goal": GOAL,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{dtype} product: {peak / 1e12:.2f} TFLOP/s", flush=True)
    for shape in ["tiny"] if options.tiny else options.shapes:
        glide = build(TINY if options.tiny else SHAPES[shape], device, dtype)
        fastest = glide.states.attention
        ways = [(way, fastest) for way in (*WAYS, (CHUNKED[0], *CHUNKED[1:3], min(CHUNKED[3], length // 4)))]
        for way, glide.states.attention in [*ways, (WAYS[0], SDPA)]:
            try:
                row = measure(glide, way, length, options.steps, peak)
            except torch.OutOfMemoryError as error:
                row = {"way": way[0], "tokens": length, "out_of_memory": str(error).splitlines()[0]}
            rows.append({"shape": shape, "attention": glide.states.attention, **row})
            print(json.dumps(rows[-1]), flush=True)
            if not options.tiny:  # after each row: a run that is cut short keeps what it has
                (options.out / "glide_gpu.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
        del glide
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
