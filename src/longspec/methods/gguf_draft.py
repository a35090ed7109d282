"""Read a draft folder with its own decoder layers, and write it as the GGUF file that llama.cpp loads with its target.

What llama.cpp's loaders of such drafts share (src/models/eagle3.cpp, dflash.cpp): `target_layers` name layers whose inputs are
read, as `layers` do here; d2t holds the target's tokens themselves; embeddings, and a missing head, are the target's.
"""

from pathlib import Path
from typing import Any

import torch

from longspec.draft_vocabulary import tokenizer_files
from longspec.methods import exported_draft
from longspec.methods.exported_draft import ExportedDraft
from longspec.methods.own_layers import OwnLayersMethod
from longspec.methods.vocabulary_tensors import D2T, T2D
from longspec.models import gguf_writer

# Tensors outside the layers: our names -> llama.cpp's.
OUTSIDE = {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight", D2T: D2T}


def read(folder: Path, method: OwnLayersMethod, context: int | None) -> ExportedDraft:
    """Read a draft folder; d2t becomes absolute token numbers. Raises ValueError as exported_draft.read does."""
    draft = exported_draft.read(folder, method, "gguf", context)
    draft.tensors.pop(T2D, None)
    if D2T in draft.tensors:
        draft.tensors[D2T] = draft.tensors[D2T] + torch.arange(len(draft.tensors[D2T]))
    return draft


def write(draft: ExportedDraft, outside: dict[str, str], keys: dict[str, Any], out: Path, dtype: str | None) -> None:
    """Write the file: tensors by llama.cpp's names, `keys` and the keys of all such drafts, and the target's tokenizer."""
    written = gguf_writer.rope_factors(draft.config)
    name_of = gguf_writer.names_of(draft.config.num_hidden_layers)
    names = OUTSIDE | outside
    for name, tensor in draft.tensors.items():
        written[names.get(name) or name_of(f"model.{name.replace('midlayer.', 'layers.0.', 1)}")] = tensor
    own = gguf_writer.layer_keys(draft.config, draft.folder / "config.json") | keys
    folder = draft.folder  # the target's tokenizer: the draft's own, else the target's
    if not (folder / "tokenizer.json").is_file():
        folder = Path(draft.content["target_path"])
        if not tokenizer_files(folder):
            raise ValueError(f"{draft.folder}: has no tokenizer, and neither has {folder}; run this where the target is")
    own |= gguf_writer.tokenizer_keys(folder, int(draft.content["target"]["vocab_size"]))
    shapes = {name: tuple(tensor.shape) for name, tensor in written.items()}
    stored = gguf_writer.dtype_of(dtype, draft.content.get("dtype"))
    gguf_writer.write(out, draft.content["draft"], own, shapes, written.__getitem__, stored)
