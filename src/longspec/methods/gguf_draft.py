"""A draft folder of decoder layers of its own, read and written as the GGUF file that llama.cpp loads beside its target.

What llama.cpp's loaders of such drafts share (src/models/eagle3.cpp, dflash.cpp): `target_layers` are layers whose inputs are
read, as `layers` are here; d2t has the target's tokens themselves; embeddings, and a missing head, are the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from longspec import methods
from longspec.config.faults import faults_in
from longspec.draft_vocabulary import tokenizer_files
from longspec.methods.draft_files import draft_weights_file, read_draft_config
from longspec.methods.vocabulary_tensors import D2T, T2D, VocabularyMethod, draft_settings
from longspec.models import gguf_writer
from longspec.models.gguf_writer import LAYER
from longspec.models.weight_files import read_tensors, telling_damage


@dataclass(frozen=True)
class GgufDraft:
    """Hold a draft folder. config: of its layers; content: of its config.json; tensors: by their own names, d2t absolute."""

    folder: Path
    content: dict[str, Any]
    settings: Any
    config: Any
    tensors: dict[str, Tensor]


def read(folder: Path, method: VocabularyMethod, context: int | None) -> GgufDraft:
    """Read a draft folder of a method for texts of `context` tokens, None: of any length.

    Raises ValueError as of the method's check_layout, draft_settings and check_state.
    """
    settings, found = draft_settings(folder, method.name, method.schema), read_draft_config(folder)
    assert found is not None, "draft_settings refuses folders without"
    (file, content), weights_file = found, draft_weights_file(folder)
    with faults_in(str(file)):
        methods.check_layout(method.name, vars(settings), "gguf", context)
    with telling_damage(file, "is no configuration of a draft"), torch.device("meta"):
        of_target = {"num_hidden_layers": content["target"]["num_hidden_layers"], "layer_types": None}
        config, layer = LlamaConfig(**content), method.layer(LlamaConfig(**content | of_target), settings)
    tensors = read_tensors(weights_file)
    method.check_state(layer, tensors, weights_file)
    tensors.pop(T2D, None)
    if D2T in tensors:
        tensors[D2T] = tensors[D2T] + torch.arange(len(tensors[D2T]))
    return GgufDraft(folder, content, settings, config, tensors)


def gguf_name(name: str, outside: Mapping[str, str]) -> str:
    """Return llama.cpp's name of a tensor: one of `outside`, or a part of layer N below `layers.N.`, else of the only layer."""
    if name in outside:
        return outside[name]
    module, _, kind = name.removeprefix("layers.").rpartition(".")
    layer, _, part = module.partition(".")
    return f"blk.{layer if layer.isdigit() else 0}.{LAYER[part]}.{kind}"


def write(draft: GgufDraft, tensors: dict[str, Tensor], keys: dict[str, Any], out: Path, dtype: str | None) -> None:
    """Write the file: tensors by llama.cpp's names, keys beside those that all such drafts have, and the target's tokenizer."""
    written = gguf_writer.rope_factors(draft.config) | tensors
    own = gguf_writer.layer_keys(draft.config, draft.folder / "config.json") | keys
    own |= gguf_writer.tokenizer_keys(_tokenizer_folder(draft), int(draft.content["target"]["vocab_size"]))
    shapes = {name: tuple(tensor.shape) for name, tensor in written.items()}
    stored = gguf_writer.dtype_of(dtype, draft.content.get("dtype"))
    gguf_writer.write(out, draft.content["draft"], own, shapes, written.__getitem__, stored)


def _tokenizer_folder(draft: GgufDraft) -> Path:
    """Return the folder that has the target's tokenizer: the draft's own, else the target's."""
    folder, target = draft.folder, Path(draft.content["target_path"])
    if not (folder / "tokenizer.json").is_file() and not tokenizer_files(target):
        raise ValueError(f"{folder}: has no tokenizer, and neither has {target}; run this where the target is")
    return folder if (folder / "tokenizer.json").is_file() else target
