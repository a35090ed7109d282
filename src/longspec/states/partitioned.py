"""A frozen target partitioned over the ranks by ZeRO-3: a rank holds its share, and layers are whole only while they run.

The target has an engine of its own, without an optimizer. The draft's engine knows nothing of it, so that the draft may be
trained with any ZeRO stage, and its checkpoints are those of a replicated target.
"""

import deepspeed
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from longspec.models.target import load_target, read_target_config
from longspec.states.forward import STATES_ATTENTION, TargetStates


def load_partitioned(path: str, dtype: torch.dtype, attention: str, chunk: int | None = None) -> TargetStates:
    """The target of a folder, each parameter partitioned as it is made and filled, so that no rank ever holds the whole.

    Every rank calls it, and later makes the same sequence of forwards; `attention` and `chunk` as of TargetStates. Raises
    ValueError for a target that is not supported.
    """
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
