"""Where a target lies that decodes: on one device, or in parts on the devices of a job's ranks."""

from typing import Any

import torch

from longspec.distributed import Ranks
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.models.tensor_parallel import split_over
from longspec.process_group import join, own_device

# One rank may read its part of the weights from a slow disk, or be alone in compiling a kernel, while the others wait.
TIMEOUT_MINUTES = 30


def draft_device(target: Any) -> torch.device:
    """Where a text is decided and its draft stands: beside the final norm of a target that `device_map` has spread.

    Layers are spread in order, so the last one, whose keys and values drafts read, runs there too. A norm that is kept in main
    memory or on the disk is brought to the device that its hook names.
    """
    norm = target.model.norm
    device: torch.device = norm.weight.device
    hook = getattr(norm, "_hf_hook", None)
    return torch.device(hook.execution_device) if device.type == "meta" and hook else device


def join_ranks(ranks: Ranks) -> None:
    """Have the ranks that are to hold a target together join; a rank that is alone has nothing to do."""
    if ranks.world_size > 1:
        join(ranks, TIMEOUT_MINUTES)


def place_target(path: str, dtype: torch.dtype, ranks: Ranks) -> Any:
    """The target of a folder on this process's device, or this rank's part of it where several have joined.

    Raises ValueError as load_target does.
    """
    config = read_target_config(path)
    if ranks.world_size > 1:
        return load_target(path, config, dtype, split=split_over(ranks.world_size))
    return load_target(path, config, dtype).to(own_device(ranks))
