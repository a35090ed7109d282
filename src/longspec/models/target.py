"""Load a frozen target: its configuration, and its weights by transformers' own classes, whole or split over a job's ranks.

If a target is split (tensor parallelism, by transformers' own plan), each rank holds some heads of every layer and some columns
of every product; after a layer each rank has the whole hidden states, and after the head all logits. In decoding, rank 0 draws
each token, so that rounding cannot make the ranks' texts differ. In training, each rank has its own rows, which all ranks run
through the target together.

Shapes: B rows, S tokens of a row, K key/value heads, T tokens, D head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
from transformers.utils import is_accelerate_available

from longspec.distributed import Ranks
from longspec.families import check_target
from longspec.models.target_config import read_target_config
from longspec.models.weight_files import open_safetensors
from longspec.process_group import join, own_device


@contextmanager
def within_memory(rule: str) -> Iterator[None]:
    """Raise ValueError, with the rule's settings to change, if a GPU runs out of memory in the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{str(error).splitlines()[0]} More GPUs share it by ranks and gres of {rule}: profiles/slurm/profile.yaml, or "
            f"--set-resources {rule}:ranks=2 on one machine; docs/large-targets.md tells how many"
        ) from error


def head_width(config: PretrainedConfig) -> int:
    """Return the width of one attention head, which may differ from hidden width / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def without_layers(config: PretrainedConfig) -> Any:
    """Return the configuration of a target's embedding, rotations, final norm and head alone."""
    without = deepcopy(config)
    without.num_hidden_layers = 0
    if getattr(config, "layer_types", None) is not None:
        without.layer_types = []
    return without


def load_target(path: str, config: PretrainedConfig, dtype: torch.dtype, attention: str | None = None, ranks: int = 1) -> Any:
    """Return the frozen target of a folder or hub name, on the CPU; `config` stays as it is.

    attention: the name of a registered implementation; None: transformers chooses. ranks: of the process group; if several,
    they share the target, each part on its rank's own device. Raises ValueError for a target that is not supported or cannot
    be split so, and for a damaged file of weights.
    """
    check_target(config, f"{path}/config.json")
    for file in sorted(Path(path).glob("*.safetensors")):  # none for a hub name: the hub's client checks what it loads
        open_safetensors(file)
    spread: dict[str, Any] = {}
    if ranks > 1:
        check_splits(config, ranks, f"{path}/config.json")
        spread = {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}
    # from_pretrained casts the weights but keeps RoPE's inv_freq in float32; .to(dtype) would cast both.
    target = AutoModelForCausalLM.from_pretrained(
        path, config=deepcopy(config), dtype=dtype, attn_implementation=attention, trust_remote_code=False, **spread
    )
    return target.requires_grad_(False).eval()


def resolve_dtype(precision: str) -> torch.dtype:
    """Return the dtype of "auto" (bfloat16 on a GPU that has it, else float32), "fastest" (the same, but bfloat16 on a
    processor with instructions for it), "bf16" or "fp32".

    Raises ValueError, with the key, if this GPU lacks bfloat16 and it is asked for.
    """
    # By default torch counts emulated bfloat16 as supported, but no compiled kernel takes it.
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16" and torch.cuda.is_available() and not has_bf16:
        raise ValueError("recipe.precision: bf16, but this GPU has no bfloat16, or emulates it; set it to fp32")
    if precision == "fp32":
        return torch.float32
    if precision == "fastest" and not torch.cuda.is_available():  # else bfloat16 products are slower than float32 ones
        has_bf16 = any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if precision == "bf16" or has_bf16 else torch.float32


# One rank may read its weights from a slow disk, or be the only one to compile a kernel, while the others wait.
TIMEOUT_MINUTES = 30


def draft_device(target: Any) -> torch.device:
    """Return the device of the draft and of choosing tokens: that of the final norm if `device_map` has spread the target.

    Layers are spread in order, so the last layer, whose keys and values drafts read, runs there too. If the norm is kept in
    main memory or on disk, its hook names the device.
    """
    norm = target.model.norm
    hook = getattr(norm, "_hf_hook", None)
    return torch.device(hook.execution_device) if norm.weight.is_meta and hook else norm.weight.device


def join_ranks(ranks: Ranks) -> None:
    """Join the process group of the ranks that will hold a target together; a single rank does nothing."""
    if ranks.world_size > 1:
        join(ranks, TIMEOUT_MINUTES)


def place_target(path: str, dtype: torch.dtype, ranks: Ranks) -> Any:
    """Return the target of a folder on this process's device, or this rank's part of it if several ranks have joined.

    Raises ValueError as load_target does.
    """
    config = read_target_config(path)
    if ranks.world_size > 1:
        return load_target(path, config, dtype, ranks=ranks.world_size)
    return load_target(path, config, dtype).to(own_device(ranks))


Group = Any  # torch.distributed.ProcessGroup; torch without distributed support types it as another class


def check_splits(config: PretrainedConfig, ranks: int, path: object) -> None:
    """Raise ValueError if a target cannot be split over so many ranks, or the package for loading it is missing.

    transformers needs a plan for its family's layers. If the plan splits key/value heads, their number must be a multiple of
    the ranks: a head is never divided.
    """
    if not is_accelerate_available():
        raise ValueError(f"{path}: transformers splits a target over ranks by the package accelerate: pip install accelerate")
    heads = config.num_key_value_heads
    if not config.base_model_tp_plan:
        raise ValueError(
            f"{path}: model_type {config.model_type!r}: transformers has no plan to split its layers over ranks; start one rank"
        )
    if heads_of_rank(config, ranks) is None:
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(f"{path}: num_key_value_heads: {heads} heads cannot be split over {ranks} ranks; start {fitting}")


def heads_of_rank(config: PretrainedConfig, ranks: int) -> int | None:
    """Return each rank's key/value heads: all, if the plan gathers them; None: so many ranks cannot share the target."""
    plan: dict[str, str] = config.base_model_tp_plan or {}
    if not plan and ranks > 1:
        return None
    return get_kv_heads_per_rank(plan, config.num_key_value_heads, ranks)


def group_of(target: Any) -> Group | None:
    """Return the group of ranks that hold a target together; None if one rank holds it all."""
    if (getattr(target, "_tp_size", None) or 1) == 1:
        return None
    return target._device_mesh["tp"].get_group()


def splits_heads(target: Any) -> bool:
    """Tell whether each rank has only some of the key/value heads; if the plan gathers them, each has all."""
    group = group_of(target)
    return group is not None and heads_of_rank(target.config, group.size()) != target.config.num_key_value_heads


def of_ranks(x: Tensor, group: Group) -> list[Tensor]:
    """Return the tensors of all ranks, in their order; all must have one shape."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def all_heads_at(x_BKTD: Tensor, group: Group, rank: int) -> Tensor:
    """Return the heads of all ranks on one rank; the others get their own back."""
    own = x_BKTD.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())] if group.rank() == rank else None
    dist.gather(own, parts, group=group, group_dst=rank)
    return own if parts is None else torch.cat(parts, dim=1)


def rows_of_ranks(
    input_ids_BS: Tensor, position_ids_BS: Tensor, document_ids_BS: Tensor | None, group: Group
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return tokens, positions and documents (None: one a row) of each rank's rows, in the ranks' order; all of one shape."""
    one = torch.full_like(input_ids_BS, -1) if document_ids_BS is None else document_ids_BS
    found = [given.unbind() for given in of_ranks(torch.stack([input_ids_BS, position_ids_BS, one]), group)]
    return [(ids, positions, None if documents[0, 0] < 0 else documents) for ids, positions, documents in found]


def own_heads(x_BKTD: Tensor, group: Group) -> Tensor:
    """Return this rank's heads out of those of all ranks."""
    own = x_BKTD.shape[1] // group.size()
    return x_BKTD.narrow(1, group.rank() * own, own)


def tensor_of_first_rank(x: Tensor, group: Group | None) -> Tensor:
    """Return rank 0's tensor, on every rank."""
    if group is None:
        return x
    found = x.contiguous().clone()
    dist.broadcast(found, group=group, group_src=0)
    return found


def whole(weight: Tensor) -> Tensor:
    """Return a weight with all ranks' parts; a new tensor if it is split."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
