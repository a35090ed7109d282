"""Sources that a draft can be extracted from, read on one CPU; of the target only its tensors' names are read:

- checkpoint.json of a finished stage, or one slot of its checkpoints
- a state dict: .safetensors, or what torch.save wrote, or the index.json of either when it is split into several files

In a state dict the draft's tensors carry the prefix `draft_model.`; every other tensor is left out and counted.
"""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from longspec.atomic_files import read_json_object, sha256_file
from longspec.distributed import log
from longspec.methods.draft_files import TRAINING_PREFIX
from longspec.models.model_folder import INDEX, read_weight_map
from longspec.models.weight_files import read_split, read_tensors
from longspec.train.checkpoint.checkpoint_dir import MANIFEST
from longspec.train.checkpoint.save_load import draft_state_dict


def read_weights(source: Path) -> dict[str, Tensor]:
    """Read the draft's state dict, names without the prefix. Nothing in the files is run.

    Raises ValueError that names what is missing, damaged or not a source at all.
    """
    if source.is_dir():
        if (source / MANIFEST).is_file():
            return draft_state_dict(source)
    elif not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    elif source.name.endswith(INDEX):
        others = dict.fromkeys(read_weight_map(source), torch.empty(0))
        return without_prefix(others | read_split(source, _is_drafts), source)
    elif source.suffix == ".json":
        return draft_state_dict(finished_slot(source))
    elif source.suffix in (".safetensors", ".pth", ".pt", ".bin"):
        return without_prefix(read_tensors(source, _is_drafts), source)
    raise ValueError(
        f"{source}: holds no weights that are known; give the checkpoint.json of a finished stage, a slot of its checkpoints, "
        f"or a state dict (.safetensors, .pth, .pt, .bin, or their {INDEX})"
    )


def finished_slot(source: Path) -> Path:
    """Return the slot that a checkpoint.json names. Raises ValueError when it is another one by now."""
    checkpoint = read_json_object(source)
    if not isinstance(checkpoint.get("slot"), str) or "manifest_sha256" not in checkpoint:
        raise ValueError(f"{source}: not the checkpoint.json of a finished stage; train the stage to its end")
    slot = source.parent / checkpoint["slot"]
    if not (slot / MANIFEST).is_file() or sha256_file(slot / MANIFEST) != checkpoint["manifest_sha256"]:
        raise ValueError(f"{slot}: is not the checkpoint that {source} names; train the stage again")
    return slot


def without_prefix(state: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Keep the tensors whose names begin with the prefix, less the prefix; what is left out goes to the log."""
    kept = {name.removeprefix(TRAINING_PREFIX): t for name, t in state.items() if name.startswith(TRAINING_PREFIX)}
    others = [name for name in state if not name.startswith(TRAINING_PREFIX)]
    if not kept:
        examples = f", such as {', '.join(others[:3])}" if others else ""
        raise ValueError(f"{source}: no name begins with {TRAINING_PREFIX}; it holds {len(others)} other tensors{examples}")
    if others:
        counts = Counter(name.split(".")[0] for name in others)
        log(f"{source}: left out: {', '.join(f'{count} of {first}.*' for first, count in sorted(counts.items()))}")
    return kept


def _is_drafts(name: str) -> bool:
    return name.startswith(TRAINING_PREFIX)
