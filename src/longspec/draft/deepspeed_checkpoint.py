"""Checkpoints that DeepSpeed itself wrote (other trainers' ones), of ZeRO stage 0 to 3 and any number of ranks.

They are Python pickles: reading one runs what it says. Read only what comes from people you trust.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LATEST = "latest"
MODEL_STATES = "mp_rank_00_model_states.pt"
PARTITIONED_MODEL_STATES = "zero_pp_rank_{rank}_" + MODEL_STATES
OPTIMIZER_STATES = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)(_mp_rank_00_optim_states\.pt)")


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint: that of one tag, or the one above it."""
    return (folder / LATEST).is_file() or (folder / MODEL_STATES).is_file() or bool(_optimizer_files(folder))


def read_deepspeed(folder: Path) -> dict[str, Tensor]:
    """The trained tensors under their full names, float32 where the optimizer has them. Frozen ones are not read.

    Raises ValueError that names a missing file.
    """
    if (folder / LATEST).is_file():
        tag = (folder / LATEST).read_text().strip()
        if not (folder / tag).is_dir():
            raise ValueError(f"{folder / tag}: missing, though {folder / LATEST} names it")
        folder = folder / tag
    files = _optimizer_files(folder)
    if not files:
        # Stage 0: the weights are in the model's own states, as every rank had them.
        saved = torch.load(folder / MODEL_STATES, map_location="cpu", mmap=True, weights_only=False)
        return dict(saved["module"])
    ranks, stage = _check_complete(folder, files)
    if stage is None:
        return _read_flat(folder, [_optimizer_state(files[rank]) for rank in range(ranks)])
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name, exclude_frozen_parameters=True)


def _optimizer_files(folder: Path) -> dict[int, Path]:
    """The files of the optimizer by rank."""
    matches = [(OPTIMIZER_STATES.fullmatch(path.name), path) for path in folder.iterdir()]
    return {int(match[2]): path for match, path in matches if match}


def _optimizer_state(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)["optimizer_state_dict"]


def _check_complete(folder: Path, files: dict[int, Path]) -> tuple[int, int | None]:
    """All ranks' files are there, of as many ranks as the first one says there were; these ranks and the ZeRO stage.

    Stage 1 in bfloat16 with gradients accumulated in float32 has an optimizer of its own, which names no stage.
    """
    first = files[min(files)]
    state = _optimizer_state(first)
    count, stage = state["partition_count"], state.get("zero_stage")
    ranks = max(count) if isinstance(count, list) else count
    names = [OPTIMIZER_STATES.sub(rf"\g<1>{rank}\g<3>", first.name) for rank in range(ranks)]
    names += [PARTITIONED_MODEL_STATES.format(rank=rank) for rank in range(ranks)] if stage == 3 else [MODEL_STATES]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing)}: missing; the checkpoint is of {ranks} ranks")
    return ranks, None if stage is None else int(stage)


def _read_flat(folder: Path, states: list[Any]) -> dict[str, Tensor]:
    """Float32 weights that were laid end to end, group by group, and cut into equal parts, one a rank."""
    saved = torch.load(folder / MODEL_STATES, map_location="cpu", mmap=True, weights_only=False)
    weights = {}
    for group, shapes in enumerate(saved["param_shapes"]):
        flat, offset = torch.cat([state["single_partition_of_fp32_groups"][group] for state in states]), 0
        for name, shape in shapes.items():
            weights[name] = flat[offset : offset + shape.numel()].view(shape).detach().clone()
            offset += shape.numel()
    return weights
