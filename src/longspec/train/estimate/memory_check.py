"""Does a job fit its devices? The estimate as a table, what to change, and a dry batch that finds out before step 1."""

import os
from dataclasses import replace
from typing import Any

import torch

from longspec.config import PARTITIONED, TENSOR_PARALLEL, Recipe, Runtime
from longspec.distributed import Ranks, log
from longspec.methods import measures_target
from longspec.models.target import heads_of_rank
from longspec.train.estimate.memory import BUCKET, GIB, GPU_OVERHEAD, OPTIMIZER, Item, Setup, estimate, peak, setup_of

CHUNK = 4096  # what is proposed for runtime.target_chunk
LARGEST = 4  # items that a message names
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in the message of the RuntimeError that torch raises on CPUs


def gib(size: float) -> str:
    """A size as people read it."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def table(setup: Setup) -> str:
    """The estimate as lines, largest first, with the peaks of device and host."""
    items, lines = estimate(setup), []
    for on_host, place in ((False, "device"), (True, "host")):
        here = sorted((item for item in items if item.on_host == on_host), key=lambda item: -item.bytes)
        lines += [f"  {item.name:38s} {gib(item.bytes):>12s}  {item.phase}" for item in here]
        if here:
            lines.append(f"  {f'PEAK of one rank, {place}':38s} {gib(peak(items, on_host=on_host)):>12s}")
    return "\n".join(lines)


def alternatives(setup: Setup) -> list[tuple[str, int]]:
    """Switches that lower the device's peak, each with the peak it alone leads to, the best first."""
    half = setup.sequence_length // 2
    changes: dict[str, dict[str, Any]] = {
        "runtime.micro_batch: 1": {"micro_batch": 1},
        f"runtime.target: {PARTITIONED}": {"target": PARTITIONED},
        f"runtime.target: {TENSOR_PARALLEL}": {"target": TENSOR_PARALLEL},
        f"runtime.target_chunk: {CHUNK}": {"target_chunk": CHUNK},
        "runtime.deepspeed.zero_stage: 3": {"zero_stage": 3},
        "runtime.deepspeed.offload_optimizer: cpu": {"offload": "cpu", "zero_stage": max(1, setup.zero_stage)},
        f"recipe.data.sequence_length: {half}, with data packed for it": {"sequence_length": half},
        f"{2 * setup.world_size} processes": {"world_size": 2 * setup.world_size},
    }
    now = peak(estimate(setup))
    changed = [(text, replace(setup, **change)) for text, change in changes.items()]
    tried = [
        (text, peak(estimate(then)))
        for text, then in changed
        if then.target != TENSOR_PARALLEL or heads_of_rank(then.config, then.world_size)
    ]
    return sorted([(text, then) for text, then in tried if then < 0.99 * now], key=lambda pair: pair[1])


def explain_out_of_memory(setup: Setup, available: int) -> str:
    """One message: how much is needed and how much there is, what takes most, and what to change."""
    items = estimate(setup)
    largest = sorted((item for item in items if not item.on_host), key=lambda item: -item.bytes)[:LARGEST]
    options = [f"{text} (then {gib(then)})" for text, then in alternatives(setup)]
    return (
        f"out of memory: a micro batch of {setup.micro_batch} x {setup.sequence_length} tokens needs about "
        f"{gib(peak(items))} of this device's {gib(available)}; most of it: "
        f"{', '.join(f'{item.name} {gib(item.bytes)}' for item in largest)}. Change one or several of: {'; '.join(options)}"
    )


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU, or of this machine's main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def to_come(items: list[Item]) -> int:
    """Bytes on the device that DeepSpeed will hold beside a draft and its gradients."""
    return sum(item.bytes for item in items if item.name in (OPTIMIZER, BUCKET) and not item.on_host)


def dry_batch(trainer: Any, setup: Setup, *, with_llm_loss: bool) -> None:
    """A forward and backward of the largest micro batch there can be, before DeepSpeed has the draft; nothing is left of it.

    On a GPU, what DeepSpeed will hold later is taken for as long. Raises ValueError that explains when it does not fit, and
    RuntimeError when other processes hold a part of the GPU.
    """
    device, shape = setup.device, (setup.micro_batch, setup.sequence_length)
    others = 0  # bytes of a GPU that this process did not take, contexts of CUDA included
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            later = torch.empty(to_come(estimate(setup)) if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
            ids = torch.arange(shape[1], device=device).expand(shape).contiguous() % setup.config.vocab_size
            named = setup.method.heaviest(setup.settings) | {"document_ids": torch.zeros_like(ids)}
            named["row_numbers"] = torch.zeros_like(ids[:, 0])  # where states are stored, of any row
            trainer(ids, ids, with_llm_loss=with_llm_loss, **named).loss.backward()
            del later
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and CPU_ALLOCATOR not in str(error):
            raise
        reason = explain_out_of_memory(setup, memory_of(device))
        if others > GPU_OVERHEAD:  # may be gone in the next attempt
            raise RuntimeError(f"other processes held {gib(others)} of this GPU when the job started; {reason}") from error
        raise ValueError(reason) from error
    finally:
        trainer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def check_memory(
    trainer: Any, recipe: Recipe, runtime: Runtime, micro_batch: int, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> None:
    """Show the estimate, then run the dry batch; every rank calls it. Raises ValueError that explains when it does not fit."""
    setup = setup_of(trainer.states.config, recipe, runtime, micro_batch, ranks.world_size, dtype, device)
    log(f"memory of one rank, estimated; this device has {gib(memory_of(device))}:\n{table(setup)}", ranks)
    dry_batch(trainer, setup, with_llm_loss=measures_target(recipe, runtime))
