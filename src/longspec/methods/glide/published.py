"""Read GLIDE drafts that LongSpec published (sail/longspec-*): one decoder layer, as a folder or a file of weights alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from longspec.methods.draft_files import CONFIG, TRAINING_PREFIX
from longspec.methods.glide.layer import FINAL_NORM, UNUSED
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import PUBLISHED
from longspec.models.weight_files import read_folder, read_tensors

# Fields that the layer takes from the target's configuration, if the draft's own configuration has them too.
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor]
) -> tuple[dict[str, Tensor], Draft]:
    """Return state dict and settings of a published draft, for a target of this configuration.

    folder: or a file of weights alone; config: its config.json, {} for a file; embeddings: not read. Raises ValueError with
    file, key and both values if the draft was made for another target.
    """
    for name in SHAPE:
        wanted = getattr(target, name, None)
        if name in config and config[name] != wanted:
            raise ValueError(
                f"{folder / CONFIG}: {name}: is {config[name]!r}, the target's is {wanted!r}: a draft of another target; give "
                "that target, or another draft"
            )
    found = read_tensors(folder) if folder.is_file() else read_folder(folder)
    state = {name.removeprefix(TRAINING_PREFIX): tensor for name, tensor in found.items()}
    final_norm = any(FINAL_NORM in name for name in state)
    return {name: tensor for name, tensor in state.items() if name not in UNUSED}, replace(PUBLISHED, final_norm=final_norm)
