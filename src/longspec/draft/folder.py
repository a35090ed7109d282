"""The draft folder: weights under the published names, config.json, and how transformers decodes with it."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from longspec.atomic_files import new_folder, write_json
from longspec.config import Recipe
from longspec.draft.custom_generate import write_custom_generate
from longspec.methods.glide.layer import GlideLayer
from longspec.methods.glide.weights import CONFIG, KIND, PTH, SAFETENSORS, UNUSED, published_layout
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


def empty_layer(target_path: str, recipe: Recipe) -> GlideLayer:
    """The draft's layer for its names and shapes; it holds no numbers."""
    with torch.device("meta"):
        return GlideLayer(read_target_config(target_path), final_norm=recipe.draft.final_norm)


def draft_config(target_path: str, recipe: Recipe, state: dict[str, Tensor]) -> dict[str, Any]:
    """config.json: the target's family and shapes, and the variant's switches a decoder must know."""
    target = read_target_config(target_path).to_dict()
    return {
        "draft": KIND,
        "num_parameters": sum(tensor.numel() for name, tensor in state.items() if name not in UNUSED),
        "model_target": recipe.model._target_,
        "target_path": target_path,  # as the manifest has it, relative to the workflow's folder when inside of it
        "target_source": recipe.model.source,
        "target": {name: target[name] for name in TARGET_FIELDS if target.get(name) is not None},
        "settings": OmegaConf.to_container(recipe.draft),
        "stage": recipe.stage,
    }


def write_draft(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A draft folder from the draft layer's state dict, whole or not at all."""
    published = published_layout(state)
    with new_folder(folder) as beside:
        save_file(published, beside / SAFETENSORS, metadata={"format": "pt"})
        torch.save(published, beside / PTH)
        write_json(beside / CONFIG, config)
        write_custom_generate(beside)
