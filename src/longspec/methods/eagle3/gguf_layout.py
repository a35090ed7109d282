"""A draft folder as the GGUF file that llama.cpp loads beside its target: architecture `eagle3`, of one decoder layer.

llama.cpp's loader says (src/models/eagle3.cpp): `target_layers` are layers whose inputs are read, as `layers` are here; d2t has
the target's tokens themselves; hidden_norm is `attn_norm_2`, the norm before fc `enc.output_norm`. Embeddings are the target's.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from longspec.config.faults import faults_in
from longspec.draft_vocabulary import tokenizer_files
from longspec.methods.draft_files import draft_weights_file, read_draft_config
from longspec.methods.eagle3.layer import Eagle3Layer
from longspec.methods.eagle3.method import check_draft_state
from longspec.methods.eagle3.settings import NAME, Settings, check_layout
from longspec.methods.vocabulary_tensors import D2T, T2D, draft_settings
from longspec.models import gguf_writer
from longspec.models.gguf_writer import LAYER
from longspec.models.weight_files import read_tensors, telling_damage

OURS = "midlayer."
OUTSIDE = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    f"{OURS}hidden_norm.weight": "blk.0.attn_norm_2.weight",
    D2T: D2T,
}


def write(folder: Path, out: Path, dtype: str | None, context: int | None) -> None:
    """Write the file. Raises ValueError as of check_layout, draft_settings, check_draft_state and gguf_writer."""
    settings, found = draft_settings(folder, NAME, Settings), read_draft_config(folder)
    assert found is not None, "draft_settings refuses folders without"
    (file, content), weights_file = found, draft_weights_file(folder)
    with faults_in(str(file)):
        check_layout("gguf", vars(settings), context)
    with telling_damage(file, "is no configuration of a draft"), torch.device("meta"):
        config = LlamaConfig(**content)
        layer = Eagle3Layer(config, settings)
    tensors = read_tensors(weights_file)
    check_draft_state(layer, tensors, weights_file)
    tensors.pop(T2D, None)
    if D2T in tensors:
        tensors[D2T] = tensors[D2T] + torch.arange(len(tensors[D2T]))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    written = gguf_writer.rope_factors(config)
    for name, tensor in tensors.items():
        turned = heads.get(name.split(".")[-2]) if "." in name else None
        written[gguf_name(name)] = tensor if turned is None else gguf_writer.permuted(tensor, turned)
    keys = gguf_writer.layer_keys(config, file) | {
        "target_layers": content["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": int(config.hidden_size),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
    }
    keys |= gguf_writer.tokenizer_keys(_tokenizer_folder(folder, content), int(content["target"]["vocab_size"]))
    shapes = {name: tuple(tensor.shape) for name, tensor in written.items()}
    gguf_writer.write(out, NAME, keys, shapes, written.__getitem__, gguf_writer.dtype_of(dtype, content.get("dtype")))


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a draft's tensor."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    module, _, kind = name.removeprefix(OURS).rpartition(".")
    return f"blk.0.{LAYER[module]}.{kind}"


def _tokenizer_folder(folder: Path, content: dict[str, Any]) -> Path:
    """Return the folder that has the target's tokenizer: the draft's own, else the target's."""
    target = Path(content["target_path"])
    if not (folder / "tokenizer.json").is_file() and not tokenizer_files(target):
        raise ValueError(f"{folder}: has no tokenizer, and neither has {target}; run this where the target is")
    return folder if (folder / "tokenizer.json").is_file() else target
