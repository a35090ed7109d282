"""Checkpoints that DeepSpeed itself wrote (other trainers' ones), of ZeRO stage 0 to 3 and any number of ranks.

They are Python pickles, which run what they say when they are read. Here they may hold tensors, plain values and the few
types that DeepSpeed puts beside them; a file that asks for more is refused, unless all files are said to be trusted.
"""

import argparse
import glob
import itertools
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.models.weight_files import read_pickle, telling_damage, tensors_by_name

LATEST = "latest"
MODEL_STATES = "mp_rank_00_model_states.pt"
PARTITIONED_MODEL_STATES = "zero_pp_rank_{rank}_" + MODEL_STATES
OPTIMIZER_STATES = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)(_mp_rank_00_optim_states\.pt)")
STATES = ("*_model_states.pt", "*_optim_states.pt")  # what DeepSpeed's reader opens
NAMED = 5  # files of a message
NAMELY = 80  # characters of a strange tag
ADVICE = (
    "--trust-pickle reads it all the same and runs whatever code the file holds: give it only if you trust who made the file"
)
# By which torch.load reads as weights_only=True says, also where its caller asks for more.
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
STRANGE = "does not hold what DeepSpeed writes"
Load = Callable[[Path], Any]


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint: that of one tag, or the one above it."""
    return (folder / LATEST).is_file() or (folder / MODEL_STATES).is_file() or bool(_optimizer_files(folder))


def read_deepspeed(folder: Path, *, trust_pickle: bool = False) -> dict[str, Tensor]:
    """The trained tensors under their full names, float32 where the optimizer has them. Frozen ones are not read.

    With `trust_pickle` the files run whatever they say. Raises ValueError that names a file which is missing, is damaged, is
    no part of the checkpoint, or asks for more than tensors.
    """
    load = partial(read_pickle, trust=trust_pickle, advice=ADVICE)
    with nullcontext() if trust_pickle else _tensors_alone():
        return tensors_by_name(_read(_folder_of_tag(folder), load), folder)


@contextmanager
def _tensors_alone() -> Iterator[None]:
    """Let files hold the types that DeepSpeed puts into them, and nothing more, whoever reads them."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    types = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, argparse.Namespace]
    # Some versions of Python, Debian 12's among them, pickle a member of an Enum as getattr(class, name).
    getattr_of_enum = (partial(_member, ZeroStageEnum), "builtins.getattr")
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals([*types, getattr_of_enum]):
            yield
    finally:
        del os.environ[FORCE]
        if before is not None:
            os.environ[FORCE] = before


def _member(enum: type[Enum], of: Any, name: Any) -> Enum:
    """The member of `enum` that a pickle asks getattr for. Raises UnpicklingError for anything else: a method would be code."""
    if of is not enum or type(name) is not str or name not in enum.__members__:
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL getattr for anything but a member of {enum.__name__}")
    return enum.__members__[name]


def _folder_of_tag(folder: Path) -> Path:
    """The folder that `latest` names, else the given one."""
    latest = folder / LATEST
    if not latest.is_file():
        return folder
    tag = latest.read_text(errors="replace").strip()
    if tag not in [path.name for path in folder.iterdir() if path.is_dir()]:
        raise ValueError(f"{latest}: names {tag[:NAMELY]!r}, and there is no such folder beside it; give the folder of a tag")
    return folder / tag


def _optimizer_files(folder: Path) -> dict[int, Path]:
    matches = [(OPTIMIZER_STATES.fullmatch(path.name), path) for path in folder.iterdir()]
    return {int(match[2]): path for match, path in matches if match}


def _read(folder: Path, load: Load) -> Any:
    files = _optimizer_files(folder)
    if not files:
        # Stage 0: the weights are in the model's own states, as every rank had them.
        path = folder / MODEL_STATES
        saved = load(path)
        with telling_damage(path, STRANGE):
            return saved["module"]
    ranks, stage = _ranks_and_stage(files[min(files)], load)
    names = _check_complete(folder, files[min(files)].name, ranks, stage)
    states = [load(folder / name) for name in names]  # each is looked at before anything else opens it
    if stage is None:
        with telling_damage(folder, STRANGE):
            return _read_flat(states[-1], [state["optimizer_state_dict"] for state in states[:-1]])
    if glob.escape(str(folder)) != str(folder):
        raise ValueError(f"{folder}: DeepSpeed takes *, ? and [ in a path for a pattern; move the checkpoint to another path")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with telling_damage(folder, STRANGE):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name, exclude_frozen_parameters=True)


def _ranks_and_stage(first: Path, load: Load) -> tuple[int, int | None]:
    """How many ranks saved, and the ZeRO stage, by the optimizer's file of one of them.

    Stage 1 in bfloat16 with gradients accumulated in float32 has an optimizer of its own, which names no stage.
    """
    saved = load(first)
    with telling_damage(first, STRANGE):
        state = saved["optimizer_state_dict"]
        count, stage = state["partition_count"], state.get("zero_stage")
        return int(max(count) if isinstance(count, list) else count), None if stage is None else int(stage)


def _check_complete(folder: Path, first: str, ranks: int, stage: int | None) -> list[str]:
    """The names of all files, the optimizer's first. Raises ValueError when one is missing, or others stand among them."""
    names = (OPTIMIZER_STATES.sub(rf"\g<1>{rank}\g<3>", first) for rank in range(ranks))
    model = (PARTITIONED_MODEL_STATES.format(rank=rank) for rank in range(ranks)) if stage == 3 else iter([MODEL_STATES])
    found: list[str] = []
    missing: list[str] = []
    for name in itertools.chain(names, model):
        (found if (folder / name).is_file() else missing).append(name)
        if len(missing) == NAMED:  # a damaged file may name any number of ranks
            break
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing)}: missing; the checkpoint is of {ranks} ranks")
    strange = sorted({path.name for pattern in STATES for path in folder.glob(pattern)} - set(found))
    if strange:
        raise ValueError(
            f"{folder}: {', '.join(strange[:NAMED])}: no part of the checkpoint of {ranks} ranks with ZeRO stage "
            f"{'1' if stage is None else stage}, which {first} belongs to; move what is of another save elsewhere"
        )
    return found


def _read_flat(saved: Any, states: list[Any]) -> dict[str, Tensor]:
    """Float32 weights that were laid end to end, group by group, and cut into equal parts, one a rank."""
    weights = {}
    for group, shapes in enumerate(saved["param_shapes"]):
        flat, offset = torch.cat([state["single_partition_of_fp32_groups"][group] for state in states]), 0
        for name, shape in shapes.items():
            weights[name] = flat[offset : offset + shape.numel()].view(shape).detach().clone()
            offset += shape.numel()
    return weights
