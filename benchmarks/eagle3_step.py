"""One training step of an EAGLE-3 draft, the target apart: its time against its products alone, its memory as estimated.

    python benchmarks/eagle3_step.py                          1k, 4k and 16k tokens, draft vocabularies of 8k and 32k
    python benchmarks/eagle3_step.py --lengths 1024           this length alone, beside the others of the last run
    python benchmarks/eagle3_step.py --quick                  1k alone, nothing kept
    python benchmarks/eagle3_step.py --vocabularies 8192      one vocabulary alone

A step is forward, losses and backward of all chains, of random states of a target. Its products are the gemms of the layer, the
draft's head and the teacher's logits in these shapes, forward and backward, and the backend's bare attention of every step over
the text; both are timed in turns in one process, and memory in another. On a GPU, where there is one, in bfloat16, else in
float32 on one thread. Kept in benchmarks/results/eagle3_step_{device}.json.

Shapes: B rows, S tokens, H hidden width, N query heads, K key/value heads, D head width, V vocabulary.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import RESULTS, describe, write
from benchmarks.peak import MIB, in_own_process, measure
from longspec.methods.eagle3.method import METHOD
from longspec.methods.eagle3.settings import Settings
from longspec.methods.eagle3.trainer import Eagle3Trainer
from longspec.models.attention import backends
from longspec.models.attention.visibility import Visibility
from longspec.models.losses import chunk_tokens
from longspec.models.target import head_width
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import COS, EMBEDDED, FINAL, HIDDEN, SIN

# glide_step.py's width, with as many layers as a draft reads.
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
}
LAYERS = (0, 1, 2)
LENGTHS, VOCABULARIES = (1024, 4096, 16_384), (8192, 32_768)
BAR_TIME, BAR_MEMORY, BAR_GROWTH = 1.5, 0.15, 1.15
REPEATS = 3  # above 4k tokens one


class Product(NamedTuple):
    """A product of [rows, inputs] and [inputs, outputs], with the gradients that a step takes."""

    rows: int
    inputs: int
    outputs: int
    of_inputs: bool  # whether the inputs get a gradient
    of_weight: bool


def settings_of(vocabulary: int) -> Settings:
    """A draft that proposes so many of the target's tokens, evenly chosen."""
    tokens = SHAPE["vocab_size"]
    if vocabulary == tokens:
        return Settings(layers=LAYERS)
    ids = tuple(range(0, tokens, tokens // vocabulary))
    return Settings(layers=LAYERS, vocabulary=vocabulary, ids=ids, target_vocabulary=tokens)


def build(settings: Settings, device: torch.device, dtype: torch.dtype, shape: dict[str, Any] = SHAPE) -> Eagle3Trainer:
    """A draft beside a random target, with the fastest attention."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape)
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    attention = backends.choose(backends.AUTO, device, dtype, head_width(config))
    return METHOD.trainer(TargetStates(target.requires_grad_(False).eval(), attention=attention), settings, None).to(device)


def step_of(trainer: Eagle3Trainer, length: int) -> Callable[[], None]:
    """A step on random states, which are made here; gradients are added to those that are there."""
    embedded_BSH = trainer.states.target.model.embed_tokens.weight[None, :length]
    positions_BS = torch.arange(length, device=embedded_BSH.device)[None]
    cos_BSD, sin_BSD = trainer.states.target.model.rotary_emb(embedded_BSH, positions_BS)
    names = (EMBEDDED, FINAL, *(f"{HIDDEN}{layer}" for layer in LAYERS))
    found = {name: torch.randn_like(embedded_BSH) for name in names} | {COS: cos_BSD, SIN: sin_BSD}
    trainer.states.forward = lambda *_: found  # type: ignore[method-assign]
    ids_BS = torch.randint(0, SHAPE["vocab_size"], (1, length), device=embedded_BSH.device)
    return lambda: trainer(ids_BS, ids_BS, positions_BS, with_llm_loss=False).loss.backward()


def products(config: Any, settings: Settings, length: int, device: torch.device) -> list[Product]:
    """All of a step's gemms."""
    hidden, ffn, steps = config.hidden_size, config.intermediate_size, settings.steps
    heads, key_values = (n * head_width(config) for n in (config.num_attention_heads, config.num_key_value_heads))
    made = [Product(length - 2, len(LAYERS) * hidden, hidden, False, True)]
    for step in range(steps):
        widths = ((2 * hidden, heads), *((2 * hidden, key_values),) * 2, (heads, hidden), *((hidden, ffn),) * 2, (ffn, hidden))
        made += [Product(length - 2 - step, *pair, True, True) for pair in widths]
    proposed = settings.vocabulary or config.vocab_size
    chunk = chunk_tokens(config.vocab_size + steps * proposed, device)
    for start in range(0, length - 1, chunk):
        tokens = min(chunk, length - 1 - start)
        made.append(Product(tokens, hidden, config.vocab_size, False, False))
        made.append(Product(steps * tokens, hidden, proposed, True, True))
    return made


def products_of(trainer: Eagle3Trainer, length: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """A step's products alone, on tensors that are made here."""
    config, settings = trainer.states.config, trainer.settings
    made = products(config, settings, length, device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    inputs = {each: random(each.rows, each.inputs) for each in set(made)}
    outputs = {each: random(each.rows, each.outputs) for each in set(made)}
    weights = {each: random(each.outputs, each.inputs) for each in set(made)}
    counts = [length - 2 - step for step in range(settings.steps)]
    width, heads, key_heads = head_width(config), config.num_attention_heads, config.num_key_value_heads
    q_BNSD, k_BKSD, v_BKSD = (random(1, length, n, width).transpose(1, 2) for n in (heads, key_heads, key_heads))
    grad_BNSD, visibility = torch.randn_like(q_BNSD), Visibility()

    def run() -> None:
        for each in made:
            torch.mm(inputs[each], weights[each].T)
            if each.of_inputs:
                torch.mm(outputs[each], weights[each])
            if each.of_weight:
                torch.mm(outputs[each].T, inputs[each])
        for count in counts:
            parts = [x[:, :, :count].detach().requires_grad_() for x in (q_BNSD, k_BKSD, v_BKSD)]
            out_BNSD = backends.attend(*parts, visibility, width**-0.5, trainer.states.attention)
            torch.autograd.grad(out_BNSD, parts, grad_BNSD[:, :, :count])

    return run


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Of one run; on a CPU the process's own seconds, which what else runs there changes little."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def run_case(case: dict[str, Any]) -> None:
    """Measure one case and print it: memory, or the best seconds of step and products in turns."""
    device = torch.device(case["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length, settings = case["length"], settings_of(case["vocabulary"])
    trainer = build(settings, device, dtype)
    for parameter in trainer.draft_model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # an engine holds them too
    # Thread pools and kernels; those for GPUs are compiled for a shape.
    step_of(trainer, length if device.type == "cuda" else 64)()
    step = step_of(trainer, length)
    if case["what"] == "memory":
        estimate = METHOD.memory(trainer.states.config, settings, length, dtype, device)
        bytes_ = estimate.kept + max(estimate.losses, estimate.backward)
        print(json.dumps({"MiB": measure(step, device)["MiB"], "estimated MiB": bytes_ / MIB}))
        return
    alone = products_of(trainer, length, device, dtype)
    turns = [(seconds_of(step, device), seconds_of(alone, device)) for _ in range(REPEATS if length <= 4096 else 1)]
    seconds, of_products = (min(turn[i] for turn in turns) for i in range(2))
    print(json.dumps({"seconds": seconds, "seconds of products": of_products, "attention": trainer.states.attention}))


def measured(length: int, vocabulary: int, device: str) -> dict[str, Any]:
    """One row of the result."""
    case = {"length": length, "vocabulary": vocabulary, "device": device}
    memory = in_own_process(__file__, case | {"what": "memory"}, MALLOC_MMAP_THRESHOLD_="65536")
    times = in_own_process(__file__, case | {"what": "time"})
    row = {"length": length, "vocabulary": vocabulary, **memory, **times}
    row["times the products"] = round(row["seconds"] / row["seconds of products"], 3)
    row["of the estimate"] = round(row["MiB"] / row["estimated MiB"], 3)
    print(
        f"{length:6d} tokens, {vocabulary:6d} proposed: {row['seconds']:.3f} s, {row['times the products']} x its products;"
        f" {row['MiB']:.0f} MiB, {row['of the estimate']} of the estimate",
        flush=True,
    )
    return row


def growth(rows: list[dict[str, Any]]) -> dict[int, float]:
    """For each vocabulary: the memory of a token between the two longest lengths, over that between the two shortest."""
    found = {}
    for vocabulary in VOCABULARIES:
        own = [(row["length"], row["MiB"]) for row in rows if row["vocabulary"] == vocabulary]
        slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(own)]
        if len(slopes) > 1:
            found[vocabulary] = round(slopes[-1] / slopes[0], 3)
    return found


def failures(rows: list[dict[str, Any]], grows: dict[int, float]) -> list[str]:
    """The bars that do not hold."""
    wrong = []
    for row in rows:
        name = f"{row['length']} tokens, {row['vocabulary']} proposed"
        if row["times the products"] > BAR_TIME:
            wrong.append(f"{name}: {row['times the products']} x its products, the bar is {BAR_TIME}")
        if abs(row["of the estimate"] - 1) > BAR_MEMORY:
            wrong.append(f"{name}: {row['of the estimate']} of the estimated memory, the bar is {BAR_MEMORY} off")
    wrong += [f"{v} proposed: memory grows by {g}, not linearly" for v, g in grows.items() if g > BAR_GROWTH]
    return wrong


def main() -> None:
    """All cases; fails when a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="1k tokens alone, nothing kept")
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--vocabularies", type=int, nargs="+", choices=VOCABULARIES, default=VOCABULARIES)
    options = parser.parse_args()
    if options.case:
        run_case(options.case)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, lengths = f"eagle3_step_{device}", LENGTHS[:1] if options.quick else options.lengths
    about = {
        **describe(("torch", "transformers")),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": SHAPE,
        "steps": Settings().steps,
    }
    kept = RESULTS / f"{name}.json"
    before = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.exists() and not options.quick else []
    rows = [row for row in before if row["length"] not in lengths or row["vocabulary"] not in options.vocabularies]
    for length in lengths:
        for vocabulary in options.vocabularies:
            rows.append(measured(length, vocabulary, device))
            rows.sort(key=lambda row: (row["length"], row["vocabulary"]))
            if not options.quick:  # after each row: a run that is cut short keeps what it has
                write(name, about | {"growth": growth(rows), "rows": rows})
    if wrong := failures(rows, growth(rows)):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
