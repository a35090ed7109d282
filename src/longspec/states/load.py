"""The target as a source of states, loaded as the runtime says."""

from typing import Any

import torch
import torch.distributed as dist

from longspec.config import PARTITIONED, TENSOR_PARALLEL
from longspec.models.attention.backends import choose
from longspec.models.target import CONFIG, head_width, load_target
from longspec.models.tensor_parallel import check_splits, split_over
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
    """The target of a folder: replicated (still on the CPU), partitioned over the ranks, or split over them.

    Raises ValueError for a target that is not supported or cannot be split so, and for an attention backend that cannot train
    here.
    """
    attention = choose(runtime.attention, device, dtype, head_width(config))
    if runtime.target == PARTITIONED:
        from longspec.states.partitioned import load_partitioned  # DeepSpeed takes seconds to import

        return load_partitioned(path, dtype, attention, runtime.target_chunk)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    check_ranks(config, runtime, ranks)
    split = split_over(ranks) if runtime.target == TENSOR_PARALLEL and ranks > 1 else None
    return TargetStates(load_target(path, config, dtype, STATES_ATTENTION, split), runtime.target_chunk, attention)
