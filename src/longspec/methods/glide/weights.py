"""Draft weights on the disk, under the published names."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor, nn
from transformers import PretrainedConfig

from longspec.atomic_files import read_json_object
from longspec.methods.glide.settings import Draft
from longspec.models.weight_files import read_tensors

PTH, SAFETENSORS, CONFIG = "draft_model_weights.pth", "model.safetensors", "config.json"
FIELDS = {"target": dict, "settings": dict, "target_path": str, "target_source": str}  # what is read of CONFIG
AGAIN = "make the draft folder again by python -m longspec.draft extract, or give a weight file that stands by itself"
KIND = "glide"  # the field `draft` of a draft folder's config.json
FINAL_NORM = "final_layernorm"
HUB = "hf:"
TRAINING_PREFIX = "draft_model."
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The published files hold keys and values for the cross attention, which the target's cache replaces: never used.
UNUSED = ("cross_attn.k_proj.weight", "cross_attn.k_proj.bias", "cross_attn.v_proj.weight", "cross_attn.v_proj.bias")


def draft_weights_file(path: str | Path) -> Path:
    """The file of weights behind a .pth, a .safetensors or a draft folder. Raises ValueError when there is none."""
    path = Path(path)
    if path.is_dir():
        path = path / SAFETENSORS if (path / SAFETENSORS).is_file() else path / PTH
    if not path.is_file():
        raise ValueError(f"{path}: no such draft weights; give a .pth, a .safetensors or a folder with {SAFETENSORS} or {PTH}")
    return path


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
    fill_layer(layer, read_tensors(path), path)


def fill_layer(layer: nn.Module, found: dict[str, Tensor], source: object) -> None:
    """Fill a draft layer. Raises ValueError as of check_draft_state."""
    check_draft_state(layer, found, source)
    layer.load_state_dict({name: tensor for name, tensor in found.items() if name not in UNUSED})


def _draft_config(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """config.json of a draft folder or beside a weight file of one; None for a file of weights alone.

    Raises ValueError that names a field which is not as a draft folder has it.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / CONFIG).is_file():
        return None
    file, content = folder / CONFIG, read_json_object(folder / CONFIG)
    if content.get("draft") != KIND:
        return None
    for name, kind in FIELDS.items():
        if not isinstance(content.get(name), kind):
            told = f"is {content[name]!r}" if name in content else "is missing"
            raise ValueError(f"{file}: {name}: {told}, must be {'an object' if kind is dict else 'a text'}; {AGAIN}")
    return file, content


def draft_settings(path: str | Path | None) -> Draft | None:
    """The settings that a draft's config.json holds; None for a file of weights alone. Raises ValueError for strange ones."""
    found = None if path is None else _draft_config(path)
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


def target_and_draft(target_path: str, glide_path: str | None) -> tuple[str, str | None]:
    """The paths of both, also when the first one is a draft folder, which names its target.

    Raises ValueError when that target is not where it was.
    """
    found = _draft_config(target_path) if glide_path is None and Path(target_path).is_dir() else None
    if found is None:
        return target_path, glide_path
    file, content = found
    source, path = content["target_source"], content["target_path"]
    for folder in (Path(), *file.absolute().parents):  # where the workflow ran, its root is above the draft
        if path and (folder / path / CONFIG).is_file():
            return str(folder / path), target_path
    if source.startswith(HUB):
        return source.removeprefix(HUB), target_path
    raise ValueError(f"{file}: its target {path or '(unnamed)'} is not there; give both: the target's folder and the draft's")


def check_draft_config(path: str | Path, config: PretrainedConfig) -> None:
    """Raise ValueError that names each field in which a draft folder's target differs from this one."""
    found = _draft_config(path)
    if found is None:
        return
    file, content = found
    own = config.to_dict()
    wrong = [
        f"{name}: {value!r}, this target has {own.get(name)!r}"
        for name, value in content["target"].items()
        # How long texts may be is no property of the draft; all else enters its numbers.
        if name != "max_position_embeddings" and own.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{file}: made for another target: {'; '.join(wrong)}")


def published_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with the published set of names: the unused tensors are added as zeros, for strict readers."""
    unused = {name: torch.zeros_like(state[name.replace("cross_attn", "self_attn")]) for name in UNUSED}
    return dict(sorted((state | unused).items()))
