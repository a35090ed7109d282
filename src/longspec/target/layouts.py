"""Write a target for another program: as the GGUF file that llama.cpp loads with a draft.

All of these families are written as the architecture `llama`, with biases if they have them. Drafts that read inputs of layers
get them with this architecture; with qwen2's, llama.cpp aborts ("layer input tensor is null").
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspec.distributed import log
from longspec.engines import ENGINES, LLAMA_CPP
from longspec.models import gguf_writer
from longspec.models.target_config import CONFIG, read_target_config
from longspec.models.weight_files import read_folder

GGUF = "gguf"
FAMILIES = ENGINES[LLAMA_CPP].targets or ()


def checked_layout(folder: Path, layout: str, out: Path) -> Any:
    """Return a target's configuration. Raises ValueError for an unknown layout, an existing `out`, and a target that the
    layout cannot represent.
    """
    if layout != GGUF:
        raise ValueError(f"--layout: {layout}: targets have no such layout; known: {GGUF}")
    if out.exists():
        raise ValueError(f"{out}: is there already; give another name, or remove it")
    config, file = read_target_config(str(folder)), folder / CONFIG
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{file}: model_type: {config.model_type}: the layout gguf writes {', '.join(FAMILIES)}; take the model's own GGUF "
            "file if llama.cpp drafts beside it, or serve it by vLLM"
        )
    windows = getattr(config, "layer_types", None) or []
    if "sliding_attention" in windows or (config.model_type == "mistral" and config.sliding_window is not None):
        raise ValueError(f"{file}: sliding_window: the layout gguf has none for targets; serve it by vLLM")
    return config


def write_target(folder: Path, layout: str, out: Path, dtype: str | None = None) -> None:
    """Write a target in a layout. dtype: of its weights, None: their own. Raises ValueError as checked_layout and gguf_writer
    do.
    """
    config = checked_layout(folder, layout, out)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    name_of = gguf_writer.names_of(config.num_hidden_layers)
    own = {name_of(name): name for name in weights}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    extra = gguf_writer.rope_factors(config)

    def read(name: str) -> Tensor:
        if name in extra:
            return extra[name]
        wanted = own[name]
        found = read_folder(folder, lambda each: each == wanted)
        if wanted not in found:
            raise ValueError(f"{folder}: {wanted}: is in none of its files of weights; copy or download it again")
        turned = heads.get(wanted.split(".")[-2])
        return found[wanted] if turned is None else gguf_writer.permuted(found[wanted], turned)

    shapes = {name: tuple(tensor.shape) for name, tensor in extra.items()}
    shapes |= {name: tuple(weights[each].shape) for name, each in own.items()}
    keys = gguf_writer.layer_keys(config, folder) | gguf_writer.tokenizer_keys(folder, config.vocab_size)
    stored = str(config.dtype).removeprefix("torch.")
    gguf_writer.write(out, "llama", keys, shapes, read, gguf_writer.dtype_of(dtype, stored))
    log(f"{out}: written")
