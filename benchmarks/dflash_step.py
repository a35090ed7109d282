"""One training step of a DFlash draft, the target apart: its time against its products alone, its memory as estimated.

    python benchmarks/dflash_step.py                  1k and 4k tokens
    python benchmarks/dflash_step.py --quick          1k alone, nothing kept

A step is forward, losses and backward of a row's blocks, as many slots as the row has tokens, of random states of a target.
Its products are the gemms of the layers, of the draft's logits and of the teacher's, forward and backward, and for each layer
causal attention of a text of as many tokens, which has as many pairs as the slots with the text before their blocks; both are
timed in turns in one process, and memory in another. On a GPU, where there is one, in bfloat16, else in float32 on one thread.
Kept in benchmarks/results/dflash_step_{device}.json.

Shapes: B rows, S tokens, H hidden width, D head width.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.eagle3_step import BAR_TIME, REPEATS, SHAPE, Product, seconds_of
from benchmarks.machine import describe, write
from benchmarks.peak import MIB, in_own_process, measure
from longspec.methods.dflash.method import METHOD
from longspec.methods.dflash.settings import Settings
from longspec.methods.dflash.trainer import DFlashTrainer
from longspec.models.attention import backends
from longspec.models.attention.visibility import Visibility
from longspec.models.losses import chunk_tokens
from longspec.models.target import head_width
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import COS, EMBEDDED, FINAL, HIDDEN, SIN

LENGTHS, LAYERS, BAR_MEMORY = (1024, 4096), (1, 2), 0.2


def settings_of(length: int) -> Settings:
    """Three layers and blocks of 16 slots, as many as hold the row's tokens once."""
    return Settings(layers=LAYERS, depth=3, block_size=16, row_tokens=length)


def build(length: int, device: torch.device, dtype: torch.dtype) -> DFlashTrainer:
    """A draft beside a random target, with the fastest attention."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE)
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    states = TargetStates(target.requires_grad_(False).eval())
    states.attention = backends.choose(backends.AUTO, device, dtype, head_width(config))
    return METHOD.trainer(states, settings_of(length), None).to(device)


def step_of(trainer: DFlashTrainer, length: int) -> Callable[[], None]:
    """A step on random states, which are made here; gradients are added to those that are there."""
    embedded_BSH = trainer.states.target.model.embed_tokens.weight[None, :length]
    positions_BS = torch.arange(length, device=embedded_BSH.device)[None]
    cos_BSD, sin_BSD = trainer.states.target.model.rotary_emb(embedded_BSH, positions_BS)
    names = (EMBEDDED, FINAL, *(f"{HIDDEN}{layer}" for layer in LAYERS))
    found = {name: torch.randn_like(embedded_BSH) for name in names} | {COS: cos_BSD, SIN: sin_BSD}
    trainer.states.forward = lambda *_: found  # type: ignore[method-assign]
    ids_BS = torch.randint(0, SHAPE["vocab_size"], (1, length), device=embedded_BSH.device)
    priority_BS = torch.rand(1, length, device=embedded_BSH.device)
    return lambda: trainer(ids_BS, ids_BS, positions_BS, with_llm_loss=False, priority=priority_BS).loss.backward()


def products(config: Any, settings: Settings, length: int, device: torch.device) -> list[Product]:
    """All of a step's gemms."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads, key_values = (n * head_width(config) for n in (config.num_attention_heads, config.num_key_value_heads))
    of_block = ((hidden, heads), *((hidden, key_values),) * 2, (heads, hidden), *((hidden, ffn),) * 2, (ffn, hidden))
    made = [Product(length, len(LAYERS) * hidden, hidden, False, True)]
    for _ in range(settings.depth):
        made += [Product(length, hidden, key_values, True, True)] * 2 + [
            Product(length, *pair, True, True) for pair in of_block
        ]
    predicted, chunk = length // settings.block_size * settings.predicted, chunk_tokens(2 * config.vocab_size, device)
    for start in range(0, predicted, chunk):
        tokens = min(chunk, predicted - start)
        made.append(Product(tokens, hidden, config.vocab_size, False, False))
        made.append(Product(tokens, hidden, config.vocab_size, True, False))
    return made


def products_of(trainer: DFlashTrainer, length: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """A step's products alone, on tensors that are made here."""
    config, settings = trainer.states.config, trainer.settings
    made = products(config, settings, length, device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    inputs = {each: random(each.rows, each.inputs) for each in set(made)}
    outputs = {each: random(each.rows, each.outputs) for each in set(made)}
    weights = {each: random(each.outputs, each.inputs) for each in set(made)}
    width, heads, key_heads = head_width(config), config.num_attention_heads, config.num_key_value_heads
    parts = [random(1, length, n, width).transpose(1, 2).requires_grad_() for n in (heads, key_heads, key_heads)]
    grad_BNSD, visibility = random(1, heads, length, width), Visibility()

    def run() -> None:
        for each in made:
            torch.mm(inputs[each], weights[each].T)
            if each.of_inputs:
                torch.mm(outputs[each], weights[each])
            if each.of_weight:
                torch.mm(outputs[each].T, inputs[each])
        for _ in range(settings.depth):
            out_BNSD = backends.attend(*parts, visibility, width**-0.5, trainer.states.attention)
            torch.autograd.grad(out_BNSD, parts, grad_BNSD)

    return run


def run_case(case: dict[str, Any]) -> None:
    """Measure one case and print it: memory, or the best seconds of step and products in turns."""
    device = torch.device(case["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trainer = build(case["length"], device, dtype)
    for parameter in trainer.draft_model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # an engine holds them too
    step_of(trainer, case["length"] if device.type == "cuda" else 64)()  # thread pools, and kernels that are compiled
    step = step_of(trainer, case["length"])
    if case["what"] == "memory":
        estimate = METHOD.memory(trainer.states.config, trainer.settings, case["length"], dtype, device)
        bytes_ = estimate.kept + max(estimate.losses, estimate.backward)
        print(json.dumps({"MiB": measure(step, device)["MiB"], "estimated MiB": bytes_ / MIB}))
        return
    alone = products_of(trainer, case["length"], device, dtype)
    turns = [(seconds_of(step, device), seconds_of(alone, device)) for _ in range(REPEATS)]
    seconds, of_products = (min(turn[i] for turn in turns) for i in range(2))
    print(json.dumps({"seconds": seconds, "seconds of products": of_products, "attention": trainer.states.attention}))


def measured(length: int, device: str) -> dict[str, Any]:
    """One row of the result."""
    case = {"length": length, "device": device}
    memory = in_own_process(__file__, case | {"what": "memory"}, MALLOC_MMAP_THRESHOLD_="65536")
    row = {"length": length, **memory, **in_own_process(__file__, case | {"what": "time"})}
    row["times the products"] = round(row["seconds"] / row["seconds of products"], 3)
    row["of the estimate"] = round(row["MiB"] / row["estimated MiB"], 3)
    print(f"{length:6d} tokens: {row['seconds']:.3f} s, {row['times the products']} x its products;", end=" ")
    print(f"{row['MiB']:.0f} MiB, {row['of the estimate']} of the estimate", flush=True)
    return row


def main() -> None:
    """All cases; fails when a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="1k tokens alone, nothing kept")
    options = parser.parse_args()
    if options.case:
        run_case(options.case)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measured(length, device) for length in (LENGTHS[:1] if options.quick else LENGTHS)]
    if not options.quick:
        where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        write(f"dflash_step_{device}", {**describe(("torch", "transformers")), "device": where, "shape": SHAPE, "rows": rows})
    wrong = [f"{row['length']} tokens: {row['times the products']} x" for row in rows if row["times the products"] > BAR_TIME]
    wrong += [f"{row['length']} tokens: memory" for row in rows if abs(row["of the estimate"] - 1) > BAR_MEMORY]
    if wrong:
        sys.exit(f"above {BAR_TIME} times the products, or {BAR_MEMORY} off the estimated memory: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
