"""Write the draft folder: weights under the published names, config.json, and the code with which transformers decodes."""

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from longspec.atomic_files import new_folder, write_json, write_text
from longspec.draft.trained import write_training_config
from longspec.draft_vocabulary import DraftVocabulary, tokenizer_files
from longspec.methods import method_of
from longspec.methods.contract import Method
from longspec.methods.draft_files import CONFIG, METHOD, PTH, SAFETENSORS, draft_manifest
from longspec.models.target_config import read_target_config

VOCABULARY = "draft_vocabulary.json"
# transformers' generate copies this file to its own cache and runs it there, without saying which folder it came from. So the
# caller passes the folder: draft=folder.
GENERATE = "custom_generate/generate.py"
# transformers reports a missing import as a missing package of that name, except for imports inside a `try`.
GENERATE_CODE = '''\
"""target.generate(..., custom_generate=folder, trust_remote_code=True, draft=folder): decoding with this draft."""

try:
    from longspec.decode.generate import generate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: decoding with this draft is done by the code that trained it; install longspec from its repository "
        "(pip install .)"
    ) from error

__all__ = ["generate"]
'''
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
TARGET_FIELDS = ("model_type", *SIZES, "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters")


def empty_layer(method: Method, config: Any, settings: Any) -> nn.Module:
    """Return the draft's layer on the meta device: names and shapes without numbers. config: the target's."""
    with torch.device("meta"):
        return method.layer(config, settings)


def draft_config(target_path: str, recipe: Any, vocabulary: DraftVocabulary | None = None) -> dict[str, Any]:
    """Return config.json of the draft that a stage with this recipe trains."""
    model, (method, settings) = recipe.model, method_of(recipe, vocabulary)
    return config_of(method, settings, target_path, model.source, recipe.stage) | {"model_target": model._target_}


def config_of(method: Method, settings: Any, target_path: str, target_source: str, stage: str) -> dict[str, Any]:
    """Return config.json: the target's family and shapes, the settings that a decoder must know, and the method's fields."""
    config = read_target_config(target_path)
    target, own = config.to_dict(), method.config_fields(config, settings)
    # A field added later is not stored at its default, so it reads the same as a folder written before the field existed.
    stored = {
        each.name: getattr(settings, each.name)
        for each in fields(settings)
        if each.metadata.get("stored", True)
        and not (each.metadata.get("later") and getattr(settings, each.name) == each.default)
    }
    return own | {
        METHOD: method.name,
        "num_parameters": sum(tensor.numel() for tensor in empty_layer(method, config, settings).state_dict().values()),
        "model_target": None,
        "target_path": target_path,  # as the manifest has it: relative to the workflow's folder if inside it
        "target_source": target_source,
        "target": {name: target[name] for name in TARGET_FIELDS if target.get(name) is not None},
        "settings": stored | own.get("settings", {}),
        "stage": stage,
    }


def write_draft(
    folder: Path,
    published: dict[str, Tensor],
    config: dict[str, Any],
    vocabulary: DraftVocabulary | None = None,
    tokenizer: Path | None = None,
    training: dict[str, Any] | None = None,
) -> None:
    """Write a draft folder with these tensors; it appears whole or not at all.

    vocabulary: written as a file of the folder; tokenizer: a folder whose tokenizer is copied; training: for each stage the
    `recipe` and `runtime` it was trained with. Raises ValueError if the folder holds something else than a draft.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / GENERATE).parent.is_dir():
        raise ValueError(f"{folder}: holds other files than a draft's, which would be lost; give another folder")
    draft_manifest(folder).unlink(missing_ok=True)  # describes the previous folder
    with new_folder(folder) as beside:
        save_file(published, beside / SAFETENSORS, metadata={"format": "pt"})
        torch.save(published, beside / PTH)
        write_json(beside / CONFIG, config)
        write_text(beside / GENERATE, GENERATE_CODE)
        if vocabulary is not None:
            vocabulary.write(beside / VOCABULARY)
        if tokenizer is not None:
            for name in tokenizer_files(tokenizer):
                shutil.copy(tokenizer / name, beside / name)
        if training is not None:
            write_training_config(beside, training)
