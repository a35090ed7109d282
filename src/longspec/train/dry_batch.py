"""Measure what the estimate says of memory: forward and backward of the largest possible micro batch, before step 1."""

from typing import Any

import torch

from longspec.config import Recipe, Runtime
from longspec.distributed import Ranks, log
from longspec.methods import measures_target
from longspec.train.estimate.memory import GPU_OVERHEAD, Setup, gib, memory_of, out_of_memory, setup_of, table, training_state

CPU_ALLOCATOR = "DefaultCPUAllocator"  # part of the message of torch's RuntimeError on CPUs


def dry_batch(trainer: Any, setup: Setup, *, with_llm_loss: bool) -> None:
    """Run forward and backward of the largest possible micro batch, before DeepSpeed has the draft; nothing is left of it.

    On a GPU, memory that DeepSpeed will hold later is reserved meanwhile. Raises ValueError, with what to change, if it does
    not fit, and RuntimeError if other processes hold a part of the GPU.
    """
    device, on_gpu, shape = setup.device, setup.device.type == "cuda", (setup.micro_batch, setup.sequence_length)
    others = held_later = 0
    if on_gpu:
        # held_later: besides the draft's weights and gradients in the training dtype, which the dry batch has itself. others:
        # memory not taken by this process, with CUDA contexts.
        there = 2 * setup.draft_parameters * setup.dtype.itemsize
        held_later = max(0, sum(each.bytes for each in training_state(setup) if not each.on_host) - there)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
    try:
        with torch.random.fork_rng([device] if on_gpu else []):
            for parameter in (each for each in trainer.parameters() if each.requires_grad):  # as from the second micro batch on
                parameter.grad = torch.zeros_like(parameter)
            later = torch.empty(held_later, dtype=torch.uint8, device=device)
            ids = torch.arange(shape[1], device=device).expand(shape).contiguous() % setup.config.vocab_size
            named = setup.method.heaviest(setup.settings) | {"document_ids": torch.zeros_like(ids)}
            named["row_numbers"] = torch.zeros_like(ids[:, 0])  # any row, if states are stored
            trainer(ids, ids, with_llm_loss=with_llm_loss, **named).loss.backward()
            del later
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and CPU_ALLOCATOR not in str(error):
            raise
        reason = out_of_memory(setup, memory_of(device))
        if others > GPU_OVERHEAD:  # it may be free in the next attempt
            raise RuntimeError(f"other processes held {gib(others)} of this GPU when the job started; {reason}") from error
        raise ValueError(reason) from error
    finally:
        trainer.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def check_memory(
    trainer: Any, recipe: Recipe, runtime: Runtime, micro_batch: int, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> None:
    """Log the estimate, then run the dry batch; every rank must call it. Raises what dry_batch raises."""
    setup = setup_of(trainer.states.config, recipe, runtime, micro_batch, ranks.world_size, dtype, device)
    log(f"memory of one rank, estimated; this device has {gib(memory_of(device))}:\n{table(setup)}", ranks)
    dry_batch(trainer, setup, with_llm_loss=measures_target(recipe, runtime))
