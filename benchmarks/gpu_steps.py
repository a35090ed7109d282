"""Training steps of every method beside a target of a published shape, on one GPU; the weights are random.

    python benchmarks/gpu_steps.py                      all methods at 1k, 8k and 32k tokens, beside Qwen2.5-7B
    python benchmarks/gpu_steps.py --shape qwq-32b      beside QwQ-32B: a GPU of 141 GB
    python benchmarks/gpu_steps.py --tiny               a toy shape on any machine, to prove that the script works

A step is the target's forward, the draft's forward and backward, and AdamW in float32 on a float32 copy of the draft's
weights, all on the GPU. Each row names the attention backend.

* floor: the seconds that the formulas' operations (longspec/train/estimate/flops.py) take at the rate of a large bf16 product,
  or that the fewest bytes take at the rate of a large copy, whichever is more (floor_by); both rates are measured first
* of_estimate: the allocator's peak against the estimate of the plan (longspec/train/estimate/memory.py)

Kept in gpu_steps.jsonl, a line for each row: a second call measures what is missing in it.

Shapes: B rows, S tokens.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.cells import fill
from benchmarks.machine import RESULTS, WORK
from longspec import methods
from longspec.config import compose
from longspec.draft_vocabulary import DraftVocabulary
from longspec.models.attention.backends import SDPA, choose
from longspec.models.target import head_width
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.estimate.flops import operations
from longspec.train.estimate.memory import GPU_OVERHEAD, estimate, peak, setup_of

COMMON = {"max_position_embeddings": 65_536, "rope_theta": 1e6, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwq-32b": {
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
LENGTHS, TINY_LENGTHS = (1024, 8192, 32_768), (64, 256)
VOCABULARY = 32_000  # tokens that an EAGLE-3 draft proposes
# The run whose stage is taken, and what is set to what was published; EAGLE-3's vocabulary: VOCABULARY.
RUNS = {
    "dflash": ["run=demo-dflash", "recipe.method.layers=null", "recipe.method.depth=5", "recipe.method.block_size=16"],
    "eagle3": ["run=smollm2-eagle3", "recipe.method.sliding_window=null", "recipe.draft.steps=7", "recipe.draft.start=random"],
    "glide": ["run=smollm2-glide", "recipe.draft.start=random"],
}


def build_target(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a random target, made on the device."""
    torch.manual_seed(0)
    with device:
        config = Qwen2Config(**COMMON | shape)
        target = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=STATES_ATTENTION)
    return target.requires_grad_(False).eval()


def recipe_of(method: str, length: int, tokens: int) -> tuple[Any, Any]:
    """Return recipe and runtime of a stage at this length, for a target of so many tokens: the run for SmolLM2, online."""
    overrides = [*RUNS[method], "stage=answers", "deepspeed=zero1"]
    overrides += [f"variant={name}" for name in methods.settings_of(method).VARIANTS[:1]]
    overrides += [f"recipe.data.sequence_length={length}", "recipe.states.source=online", "recipe.states.top_k=null"]
    overrides += ["recipe.precision=auto", "recipe.optimizer.name=adamw"]
    if method == "eagle3":
        overrides.append(f"recipe.method.vocabulary={min(VOCABULARY, tokens // 4)}")
    composed = compose("train", overrides)
    return composed.recipe, composed.runtime


class MasterAdamW:
    """AdamW on float32 copies, as the training engine keeps them."""

    def __init__(self, layer: nn.Module) -> None:
        self.parameters = list(layer.parameters())
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, fused=True)

    def step(self) -> None:
        """Update once from the gradients of the layer, which are cleared."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                master.grad = None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(step: Callable[[], Any], device: torch.device, least: float = 0.5) -> float:
    """Return the mean wall time of a step, over at least two and so many seconds, after two that compile and warm up."""
    for _ in range(2):
        step()
    synchronize(device)
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < least:
        step()
        synchronize(device)
        steps += 1
    return (time.perf_counter() - began) / steps


def measured_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return operations a second of a large square product and bytes a second of a large copy, read and written."""
    side, elements = (8192, 2**30) if device.type == "cuda" else (1024, 2**22)
    # Random numbers: a GPU that multiplies constants draws less power and reaches rates that no training does.
    left = torch.randn((side, side), dtype=dtype, device=device)
    source = torch.zeros(elements, dtype=torch.int8, device=device)
    goal = torch.empty_like(source)
    product = seconds_of(lambda: left @ left, device)
    return {"operations": 2.0 * side**3 / product, "bytes": 2.0 * elements / seconds_of(lambda: goal.copy_(source), device)}


def method_of(recipe: Any, tokens: int) -> tuple[Any, Any]:
    """Return a recipe's method and settings beside a target of so many tokens; a draft vocabulary is spread over them."""
    size = methods.vocabulary_size(recipe)
    ids = tuple(range(0, tokens, tokens // size))[:size] if size else ()
    return methods.method_of(recipe, DraftVocabulary(ids, tokens, "random", {"all": 1.0}) if size else None)


def measure(target: Any, method: str, attention: str, length: int, rates: dict[str, float]) -> dict[str, Any]:
    """Return the numbers of a step of one method at one length."""
    device, dtype, config = target.device, target.dtype, target.config
    recipe, runtime = recipe_of(method, length, config.vocab_size)
    chosen, settings = method_of(recipe, config.vocab_size)
    trainer = chosen.trainer(TargetStates(target, attention=attention), settings, None).to(device)
    optimizer = MasterAdamW(trainer.draft_model)
    ids_BS = torch.randint(0, config.vocab_size, (1, length), device=device)
    draws = chosen.heaviest(settings)

    def step() -> None:
        trainer(ids_BS, ids_BS, with_llm_loss=False, **draws).loss.backward()
        optimizer.step()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(step, device)
    counted = operations(config, chosen, settings, length, [length], length - 1, with_llm_loss=False)
    parameters = sum(parameter.numel() for parameter in trainer.draft_model.parameters())
    read = sum(parameter.numel() * parameter.element_size() for parameter in target.parameters())
    # Of each of the draft's weights the optimizer reads four float32 numbers and writes three.
    moved = read + parameters * (3 * target.dtype.itemsize + 28)
    floor, by = max((sum(counted) / rates["operations"], "operations"), (moved / rates["bytes"], "bytes"))
    setup = setup_of(config, recipe, runtime, 1, 1, dtype, device)
    estimated = peak(estimate(setup)) - GPU_OVERHEAD * (device.type == "cuda")
    held = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "tflops": sum(counted) / seconds / 1e12,
        "floor_seconds": floor,
        "floor_by": by,
        "times_floor": seconds / floor,
        "peak_gib": held and held / 2**30,
        "estimated_gib": estimated / 2**30,
        "of_estimate": held and held / estimated,
    }


def here(device: torch.device, shape: str) -> dict[str, Any]:
    """Return what every cell of this machine says of it."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "shape": shape}


def options_of(text: str | None) -> tuple[argparse.Namespace, torch.device]:
    """Return the command line of a benchmark that has toy shapes, and the device; ends the program where neither is there."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a toy shape, on any machine")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results; of a toy shape .cache/benchmarks/tiny")
    options = parser.parse_args()
    if options.tiny:
        options.shape = "tiny"
    elif not torch.cuda.is_available():
        sys.exit("no GPU here; --tiny proves on any machine that the script works")
    options.out = options.out or (WORK / "tiny" if options.tiny else RESULTS)
    return options, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Measure every method at every length; a row that does not fit says so."""
    options, device = options_of(__doc__)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = build_target(SHAPES[options.shape], device, dtype)
    path, about = options.out / "gpu_steps.jsonl", here(device, options.shape)
    (rates,) = fill(path, [about | {"what": "rates"}], lambda _: measured_rates(device, dtype))
    backends = dict.fromkeys([choose("auto", device, dtype, head_width(target.config)), SDPA])

    def make(cell: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            return measure(target, cell["method"], cell["attention"], cell["tokens"], rates)
        except torch.OutOfMemoryError as error:
            return {"out_of_memory": str(error).splitlines()[0]}

    lengths = options.lengths or (TINY_LENGTHS if options.tiny else LENGTHS)
    wanted = [{"tokens": n, "method": name, "attention": way} for n in lengths for name in methods.names() for way in backends]
    fill(path, (about | cell for cell in wanted), make)


if __name__ == "__main__":
    main()
