"""A frozen target: its dtype, its weights by transformers' own unmodified classes, and where it lies."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.distributed import DistributedConfig

from longspec.distributed import Ranks
from longspec.families import check_target
from longspec.models.target_config import read_target_config
from longspec.models.tensor_parallel import check_splits, split_over
from longspec.models.weight_files import open_safetensors
from longspec.process_group import join, own_device


def head_width(config: PretrainedConfig) -> int:
    """The width of one attention head, which need not be hidden width / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def without_layers(config: PretrainedConfig) -> Any:
    """The configuration of a target that is its embedding, rotations, final norm and head alone."""
    without = deepcopy(config)
    without.num_hidden_layers = 0
    if getattr(config, "layer_types", None) is not None:
        without.layer_types = []
    return without


def load_target(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str | None = None,
    split: DistributedConfig | None = None,
) -> Any:
    """The frozen target of a folder or a hub name, on the CPU, as `config` says, which stays as it is.

    `attention` is the name of a registered implementation; None: transformers chooses. split: over the ranks of the process
    group, as of tensor_parallel.split_over, each part on its rank's own device. Raises ValueError for a target that is not
    supported, or cannot be split so, and for a damaged file of weights.
    """
    check_target(config, f"{path}/config.json")
    for file in sorted(Path(path).glob("*.safetensors")):  # of a hub name there are none: the hub's client checks what it loads
        open_safetensors(file)
    spread: dict[str, Any] = {}
    if split is not None:
        check_splits(config, split.tp_size, f"{path}/config.json")
        spread = {"distributed_config": split}
    # from_pretrained casts the weights and leaves RoPE's inv_freq in float32, which .to(dtype) would not.
    target = AutoModelForCausalLM.from_pretrained(
        path, config=deepcopy(config), dtype=dtype, attn_implementation=attention, trust_remote_code=False, **spread
    )
    return target.requires_grad_(False).eval()


def resolve_dtype(precision: str, key: str = "recipe.precision") -> torch.dtype:
    """The dtype of "auto" (bfloat16 on a GPU that has it, else float32), "fastest" (the same, and bfloat16 on a
    processor that has instructions for it), "bf16" or "fp32".

    Raises ValueError, with the key, when this GPU lacks what is asked for.
    """
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    if precision == "bf16" and torch.cuda.is_available() and not has_bf16:
        raise ValueError(f"{key}: bf16, but this GPU has no bfloat16; set it to fp32")
    if precision == "fp32":
        return torch.float32
    if precision == "fastest" and not torch.cuda.is_available():  # else products of bfloat16 are slower than those of float32
        has_bf16 = any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if precision == "bf16" or has_bf16 else torch.float32


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
