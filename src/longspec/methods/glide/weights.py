"""GLIDE weights under their published names, and the settings that a draft folder holds."""

from dataclasses import fields
from pathlib import Path

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from longspec.methods.draft_files import AGAIN, draft_weights_file, read_draft_config
from longspec.methods.glide.settings import Draft
from longspec.models.weight_files import read_tensors

FINAL_NORM = "final_layernorm"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The published files hold keys and values for the cross attention, which the target's cache replaces: never used.
UNUSED = ("cross_attn.k_proj.weight", "cross_attn.k_proj.bias", "cross_attn.v_proj.weight", "cross_attn.v_proj.bias")


def check_draft_state(layer: nn.Module, found: dict[str, Tensor], source: object) -> None:
    """Raise ValueError that names each missing, unknown or misshapen tensor, and those whose numbers are no weights.

    The unused ones are held to their shapes too, and may hold any number.
    """
    own = layer.state_dict()
    unused = {name: own[name.replace("cross_attn", "self_attn")] for name in UNUSED}
    faults = [f"{name}: missing" for name in own.keys() - found.keys()]
    for name, tensor in found.items():
        wanted = own.get(name, unused.get(name))
        if wanted is None:
            faults.append(f"{name}: unknown")
        elif tensor.shape != wanted.shape:
            faults.append(f"{name}: is {list(tensor.shape)}, this target's draft has {list(wanted.shape)}")
        elif tensor.dtype not in DTYPES:
            faults.append(f"{name}: is {tensor.dtype}, weights are {', '.join(map(str, DTYPES))}")
        elif name in own and (strange := int(tensor.isfinite().logical_not().sum())):
            faults.append(f"{name}: {strange} of its {tensor.numel()} numbers are NaN or infinite")
    if faults:
        hint = "; recipe.draft.final_norm says whether there is a final norm" if FINAL_NORM in "".join(faults) else ""
        raise ValueError(f"{source}: not the weights of this draft: {'; '.join(sorted(faults))}{hint}")


def load_draft_weights(layer: nn.Module, path: str | Path) -> None:
    """Fill a draft layer from what draft_weights_file takes. Raises ValueError as of check_draft_state."""
    path = draft_weights_file(path)
    found = read_tensors(path)
    check_draft_state(layer, found, path)
    layer.load_state_dict({name: tensor for name, tensor in found.items() if name not in UNUSED})


def draft_settings(path: str | Path | None) -> Draft | None:
    """The settings that a draft's config.json holds; None for a file of weights alone. Raises ValueError for strange ones."""
    found = None if path is None else read_draft_config(path)
    if found is None:
        return None
    file, content = found
    settings, known = content["settings"], {field.name: field for field in fields(Draft)}
    strange = sorted(settings.keys() - known.keys())
    if strange:
        raise ValueError(f"{file}: settings: {', '.join(strange)}: unknown to this version, which knows {', '.join(known)}")
    for name, field in known.items():
        if name not in settings and field.default == MISSING:
            raise ValueError(f"{file}: settings: {name}: is missing; {AGAIN}")
        allowed = (int, float) if field.type is float else (field.type,)
        if name in settings and type(settings[name]) not in allowed:
            told = getattr(field.type, "__name__", field.type)
            raise ValueError(f"{file}: settings: {name}: is {settings[name]!r}, must be of the type {told}; {AGAIN}")
    return Draft(**settings)


def published_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with the published set of names: the unused tensors are added as zeros, for strict readers."""
    unused = {name: torch.zeros_like(state[name.replace("cross_attn", "self_attn")]) for name in UNUSED}
    return dict(sorted((state | unused).items()))
