"""Read a draft folder with its own decoder layers, to lay it out for another program, and write that program's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from longspec import methods
from longspec.atomic_files import new_folder, write_json
from longspec.config.faults import faults_in
from longspec.methods.draft_files import CONFIG, SAFETENSORS, draft_weights_file, read_draft_config
from longspec.methods.own_layers import OwnLayersMethod
from longspec.models.weight_files import read_tensors, telling_damage

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ExportedDraft:
    """Hold a draft folder's content. config: of its layers; content: of its config.json; tensors: by their names there."""

    folder: Path
    content: dict[str, Any]
    settings: Any
    config: Any
    tensors: dict[str, Tensor]


def read(folder: Path, method: OwnLayersMethod, layout: str, context: int | None) -> ExportedDraft:
    """Read a draft folder of a method for a layout. context: tokens of the longest text, None: no limit.

    Raises ValueError as the method's check_layout, stored_settings and check_state do.
    """
    settings, found = method.stored_settings(folder), read_draft_config(folder)
    assert found is not None, "stored_settings refuses folders without"
    (file, content), weights_file = found, draft_weights_file(folder)
    with faults_in(str(file)):
        methods.check_layout(method.name, vars(settings), layout, context)
    with telling_damage(file, "is no configuration of a draft"), torch.device("meta"):
        of_target = {"num_hidden_layers": content["target"]["num_hidden_layers"], "layer_types": None}
        config, layer = LlamaConfig(**content), method.layer(LlamaConfig(**content | of_target), settings)
    tensors = read_tensors(weights_file)
    method.check_state(layer, tensors, weights_file)
    return ExportedDraft(folder, content, settings, config, tensors)


def write_folder(out: Path, layout: str, config: dict[str, Any], tensors: dict[str, Tensor], dtype: str | None) -> None:
    """Write a folder of a config.json and tensors. dtype: of the weights, None: unchanged.

    Raises ValueError for a dtype that the layout does not know.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"--dtype: {dtype}: is unknown to the layout {layout}; give one of {', '.join(DTYPES)}")
    if dtype is not None:
        tensors = {name: x.to(DTYPES[dtype]) if x.is_floating_point() else x for name, x in tensors.items()}
    with new_folder(out) as beside:
        write_json(beside / CONFIG, config)
        save_file(tensors, beside / SAFETENSORS, metadata={"format": "pt"})
