"""GLIDE weights under their published names, and the settings that a draft folder holds."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspec.methods.draft_files import check_draft_config, check_same_settings, draft_weights_file, stored_settings
from longspec.methods.glide.settings import Draft
from longspec.methods.layer_state import check_state
from longspec.models.weight_files import read_tensors

FINAL_NORM = "final_layernorm"
# The published files hold keys and values for the cross attention, which the target's cache replaces: never used.
UNUSED = ("cross_attn.k_proj.weight", "cross_attn.k_proj.bias", "cross_attn.v_proj.weight", "cross_attn.v_proj.bias")

# What decoding takes of the settings; how it was trained is no matter there, and a later stage may train otherwise.
DECODED = ("window", "final_norm")


def check_draft_state(layer: nn.Module, found: dict[str, Tensor], source: object) -> None:
    """Raise ValueError as of check_state. The unused tensors are held to their shapes, and may hold any number."""
    own = layer.state_dict()
    unused = {name: own[name.replace("cross_attn", "self_attn")] for name in UNUSED}
    about_norm = any(FINAL_NORM in name for name in own.keys() ^ found.keys())
    hint = "; recipe.draft.final_norm says whether there is a final norm" if about_norm else ""
    check_state(layer, found, source, unused, hint)


def load_draft_weights(layer: nn.Module, path: str | Path) -> None:
    """Fill a draft layer from what draft_weights_file takes. Raises ValueError as of check_draft_state."""
    path = draft_weights_file(path)
    load_draft_state(layer, read_tensors(path), path)


def load_draft_state(layer: nn.Module, found: dict[str, Tensor], source: object) -> None:
    """Fill a draft layer from tensors by their published names. Raises ValueError as of check_draft_state."""
    check_draft_state(layer, found, source)
    layer.load_state_dict({name: tensor for name, tensor in found.items() if name not in UNUSED})


def draft_settings(path: str | Path | None) -> Draft | None:
    """The settings that a draft folder holds; None without a path and for weights alone. Raises ValueError for strange ones."""
    return None if path is None else stored_settings(path, Draft)


def check_same_draft(path: str | Path, config: Any, settings: Draft) -> None:
    """Hold a draft folder against the target and the settings that it is decoded with; weights alone say nothing of themselves.

    Raises ValueError that names the field and both values.
    """
    check_draft_config(path, config)
    stored = draft_settings(path)
    if stored is not None:
        check_same_settings(path, "recipe.draft", DECODED, settings, stored)


def published_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with the published set of names: the unused tensors are added as zeros, for strict readers."""
    unused = {name: torch.zeros_like(state[name.replace("cross_attn", "self_attn")]) for name in UNUSED}
    return dict(sorted((state | unused).items()))
