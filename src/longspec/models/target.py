"""Loading a frozen target: transformers' own classes, unmodified."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.distributed import DistributedConfig

from longspec.families import check_target
from longspec.models.tensor_parallel import check_splits
from longspec.models.weight_files import open_safetensors


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
