"""The draft folder: weights under the published names, config.json, and how transformers decodes with it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from longspec.atomic_files import new_folder, write_json
from longspec.draft.custom_generate import write_custom_generate
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of
from longspec.methods.draft_files import CONFIG, METHOD, PTH, SAFETENSORS
from longspec.models.target_config import read_target_config

TARGET_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)


def empty_layer(target_path: str, recipe: Any) -> nn.Module:
    """The draft's layer for its names and shapes; it holds no numbers."""
    method, settings = method_of(recipe)
    with torch.device("meta"):
        return method.layer(read_target_config(target_path), settings)


def draft_config(target_path: str, recipe: Any, vocabulary: DraftVocabulary | None = None) -> dict[str, Any]:
    """config.json: the target's family and shapes, the variant's switches a decoder must know, and the method's own fields."""
    config, (method, settings) = read_target_config(target_path), method_of(recipe, vocabulary)
    target, own = config.to_dict(), method.config_fields(config, settings)
    stored = {each.name: getattr(settings, each.name) for each in fields(settings) if each.metadata.get("stored", True)}
    return own | {
        METHOD: recipe.method.name,
        "num_parameters": sum(tensor.numel() for tensor in empty_layer(target_path, recipe).state_dict().values()),
        "model_target": recipe.model._target_,
        "target_path": target_path,  # as the manifest has it, relative to the workflow's folder when inside of it
        "target_source": recipe.model.source,
        "target": {name: target[name] for name in TARGET_FIELDS if target.get(name) is not None},
        "settings": stored | own.get("settings", {}),
        "stage": recipe.stage,
    }


def write_draft(folder: Path, published: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A draft folder from the tensors that it is to hold, whole or not at all."""
    with new_folder(folder) as beside:
        save_file(published, beside / SAFETENSORS, metadata={"format": "pt"})
        torch.save(published, beside / PTH)
        write_json(beside / CONFIG, config)
        write_custom_generate(beside)
