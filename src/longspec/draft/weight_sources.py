"""What a draft can be extracted from, read on one CPU; of the target nothing is read but the names of its tensors.

- checkpoint.json of a finished stage, or one slot of its checkpoints
- a DeepSpeed checkpoint of another trainer: the folder of a tag, or the one above it with its `latest` (deepspeed_checkpoint)
- a state dict: .safetensors, or what torch.save wrote, or the index.json of either when it is split into several files

In the latter two the draft's tensors carry the prefix `draft_model.`; every other tensor is left out and counted.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longspec.atomic_files import read_json, sha256_file
from longspec.distributed import log
from longspec.draft.deepspeed_checkpoint import is_deepspeed, read_deepspeed
from longspec.methods.glide.weights import TRAINING_PREFIX
from longspec.train.checkpoint.checkpoint_dir import MANIFEST
from longspec.train.checkpoint.save_load import draft_state_dict

INDEX = ".index.json"


def read_weights(source: Path) -> dict[str, Tensor]:
    """The draft's state dict, names without the prefix.

    Raises ValueError that names what is missing, damaged or not a source at all.
    """
    if source.is_dir():
        if (source / MANIFEST).is_file():
            return draft_state_dict(source)
        if is_deepspeed(source):
            return without_prefix(read_deepspeed(source), source)
    elif not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    elif source.name.endswith(INDEX):
        return without_prefix(_read_split(source), source)
    elif source.suffix == ".json":
        return draft_state_dict(finished_slot(source))
    elif source.suffix in (".safetensors", ".pth", ".pt", ".bin"):
        return without_prefix(_read_file(source), source)
    raise ValueError(
        f"{source}: holds no weights that are known; give the checkpoint.json of a finished stage, a slot of its checkpoints, "
        f"the folder of a DeepSpeed checkpoint, or a state dict (.safetensors, .pth, .pt, .bin, or their {INDEX})"
    )


def finished_slot(source: Path) -> Path:
    """The slot that a checkpoint.json names. Raises ValueError when it is another one by now."""
    checkpoint = read_json(source)
    if not isinstance(checkpoint, dict) or "slot" not in checkpoint:
        raise ValueError(f"{source}: not the checkpoint.json of a finished stage; train the stage to its end")
    slot = source.parent / checkpoint["slot"]
    if not (slot / MANIFEST).is_file() or sha256_file(slot / MANIFEST) != checkpoint["manifest_sha256"]:
        raise ValueError(f"{slot}: is not the checkpoint that {source} names; train the stage again")
    return slot


def without_prefix(state: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, less the prefix; what is left out goes to the log."""
    kept = {name.removeprefix(TRAINING_PREFIX): t for name, t in state.items() if name.startswith(TRAINING_PREFIX)}
    others = [name for name in state if not name.startswith(TRAINING_PREFIX)]
    if not kept:
        examples = f", such as {', '.join(others[:3])}" if others else ""
        raise ValueError(f"{source}: no name begins with {TRAINING_PREFIX}; it holds {len(others)} other tensors{examples}")
    if others:
        counts = Counter(name.split(".")[0] for name in others)
        log(f"{source}: left out: {', '.join(f'{count} of {first}.*' for first, count in sorted(counts.items()))}")
    return kept


def _read_file(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """A state dict's tensors. Those that are not the draft's (or not among `names`) cost nothing: they stay on the disk."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            found = {name: _or_empty(file, name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    else:
        loaded: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ValueError(f"{path}: not a state dict of tensors by name")
        found = {name: t.clone() if name.startswith(TRAINING_PREFIX) else t for name, t in loaded.items()}
    return found if names is None else {name: found[name] for name in names if name in found}


def _or_empty(file: Any, name: str) -> Tensor:
    return file.get_tensor(name) if name.startswith(TRAINING_PREFIX) else torch.empty(0)


def _read_split(index: Path) -> dict[str, Tensor]:
    """A state dict in several files. Raises ValueError that names a missing file or tensor."""
    where: dict[str, str] = read_json(index)["weight_map"]
    state: dict[str, Tensor] = {name: torch.empty(0) for name in where if not name.startswith(TRAINING_PREFIX)}
    wanted = {name: file for name, file in where.items() if name.startswith(TRAINING_PREFIX)}
    for file in sorted(set(wanted.values())):
        path = index.parent / file
        if not path.is_file():
            raise ValueError(f"{path}: missing, though {index} lists it")
        state |= _read_file(path, [name for name, of in wanted.items() if of == file])
    missing = sorted(wanted.keys() - state.keys())
    if missing:
        raise ValueError(f"{index}: {', '.join(missing)}: not in the files it lists them for")
    return state
