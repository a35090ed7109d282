"""A frozen target partitioned over the ranks by ZeRO-3: a rank holds its share, and layers are whole only while they run.

The target has an engine of its own, without an optimizer. The draft's engine knows nothing of it, so that the draft may be
trained with any ZeRO stage, and its checkpoints are those of a replicated target.
"""

from typing import Any

import deepspeed
import torch
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.states.forward import STATES_ATTENTION, TargetStates


class _PartitionAtLoading:
    """Stands in for transformers' config of ZeRO-3, which partitions weights as they load (its own class needs accelerate)."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        """Whether parameters are partitioned, as ZeRO-3 does it: always."""
        return True


def partitioned_config(dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration for a module that is never trained."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and of no effect without an optimizer
        "bf16": {"enabled": dtype == torch.bfloat16},
        # Else ZeRO-3 replaces torch's linear for the whole process and rounds bf16 otherwise.
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
        "steps_per_print": 10**9,
    }


def load_partitioned(path: str, dtype: torch.dtype, attention: str, chunk: int | None = None) -> TargetStates:
    """The target of a folder, each parameter partitioned as it is made and filled, so that no rank ever holds the whole.

    Every rank calls it, and later makes the same sequence of forwards; `attention` and `chunk` as of TargetStates. Raises
    ValueError for a target that is not supported.
    """
    config = partitioned_config(dtype)
    loading = _PartitionAtLoading(config)  # transformers keeps a weak reference
    set_hf_deepspeed_config(loading)
    try:
        target = load_target(path, read_target_config(path), dtype, STATES_ATTENTION)
    finally:
        unset_hf_deepspeed_config()
    states = TargetStates(target, chunk, attention, deepspeed.zero.GatheredParameters)
    deepspeed.initialize(model=states, config=config)
    return states
