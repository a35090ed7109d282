"""Load the frozen target as the runtime says: on each rank whole, partitioned over the ranks by ZeRO-3, or split by heads."""

from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from longspec.config import PARTITIONED, TENSOR_PARALLEL
from longspec.models.attention.backends import choose
from longspec.models.target import check_splits, head_width, load_target, split_over
from longspec.models.target_config import CONFIG, read_target_config
from longspec.states.forward import STATES_ATTENTION, TargetStates


def check_ranks(config: Any, runtime: Any, ranks: int) -> None:
    """Raise ValueError, with the key, for a target that is to be split over ranks that cannot share it."""
    if runtime.target != TENSOR_PARALLEL or ranks == 1:
        return
    try:
        check_splits(config, ranks, f"{config.name_or_path or 'target'}/{CONFIG}")
    except ValueError as error:
        raise ValueError(f"runtime.target: {TENSOR_PARALLEL}: {error}, or set it to {PARTITIONED}") from None


def load_states(path: str, config: Any, runtime: Any, device: torch.device, dtype: torch.dtype) -> TargetStates:
    """Load the target of a folder: replicated (still on the CPU), partitioned over the ranks, or split over them.

    Raises ValueError for a target that is not supported or cannot be split so, and for an attention backend that cannot train
    here.
    """
    attention = choose(runtime.attention, device, dtype, head_width(config))
    if runtime.target == PARTITIONED:
        return load_partitioned(path, dtype, attention, runtime.target_chunk)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    check_ranks(config, runtime, ranks)
    split = split_over(ranks) if runtime.target == TENSOR_PARALLEL and ranks > 1 else None
    return TargetStates(load_target(path, config, dtype, STATES_ATTENTION, split), runtime.target_chunk, attention)


def load_partitioned(path: str, dtype: torch.dtype, attention: str, chunk: int | None = None) -> TargetStates:
    """Load a target partitioned over the ranks by ZeRO-3, as it is made and filled: no rank ever holds the whole.

    The target has an engine of its own, without an optimizer, of which the draft's knows nothing: the draft may be trained with
    any ZeRO stage, and its checkpoints are those of a replicated target. Every rank calls it, and later makes the same sequence
    of forwards.
    """
    import deepspeed  # takes seconds, and only partitioned targets need it

    config = {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and of no effect without an optimizer
        "bf16": {"enabled": dtype == torch.bfloat16},
        # Else ZeRO-3 replaces torch's linear for the whole process and rounds bf16 otherwise.
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
        "steps_per_print": 10**9,
    }
    loading = HfDeepSpeedConfig(config)  # noqa: F841 - while it lives, transformers partitions weights as they load
    try:
        target = load_target(path, read_target_config(path), dtype, STATES_ATTENTION)
    finally:
        unset_hf_deepspeed_config()
    states = TargetStates(target, chunk, attention, deepspeed.zero.GatheredParameters)
    deepspeed.initialize(model=states, config=config)
    return states
