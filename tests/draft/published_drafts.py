"""EAGLE-3 drafts as others publish them: tensors and config.json of both layouts, from the layouts' descriptions alone.

The target has nine layers; the draft has another shape than it, turns by another base, and proposes eight of its 97 tokens.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from longspec.atomic_files import write_json
from tests.targets import SHAPES

IDS = (0, 3, 4, 9, 17, 40, 41, 96)
HIDDEN, INNER, HEADS, KEY_VALUES, WIDTH, TOKENS, LAYERS = 32, 40, 8, 4, 10, 97, 9
EPS, THETA = 1e-5, 500.0
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TARGET = Qwen3Config(**SHAPES | {"num_hidden_layers": LAYERS}, head_dim=12, rms_norm_eps=1e-6, rope_parameters=ROPE)
LAYER = {"model_type": "llama", "vocab_size": TOKENS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1}
LAYER |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUES, "head_dim": WIDTH, "hidden_act": "silu"}
LAYER |= {"rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 2048}


def save_target(folder: Path, config: PretrainedConfig = TARGET) -> Any:
    torch.manual_seed(7)
    target = AutoModelForCausalLM.from_config(config).eval()
    target.save_pretrained(folder)
    return target


def tensors(proposed: int = len(IDS), norms: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A draft's random weights under the engines' names; `norms`: those before fc that it has."""
    torch.manual_seed(11)
    sizes = {
        "midlayer.self_attn.q_proj": (HEADS * WIDTH, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KEY_VALUES * WIDTH, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KEY_VALUES * WIDTH, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (proposed, HIDDEN),
    }
    found = {f"{name}.weight": nn.init.normal_(torch.empty(size), std=0.3) for name, size in sizes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        found[f"{name}.weight"] = torch.rand(HIDDEN) + 0.5
    for name in norms:
        found[f"{name}.weight"] = torch.rand(3 * HIDDEN if name == "input_norm" else HIDDEN) + 0.5
    return found


def vocabulary() -> dict[str, Tensor]:
    ids = torch.tensor(IDS)
    return {"d2t": ids - torch.arange(len(IDS)), "t2d": torch.isin(torch.arange(TOKENS), ids)}


def engines(folder: Path, found: dict[str, Tensor], **fields: Any) -> Path:
    """The engines' layout, as the authors' own drafts have it: one file of torch.save, and no word of the layers."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(found, folder / "pytorch_model.bin")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(found["lm_head.weight"])} | LAYER | fields
    write_json(folder / "config.json", {name: value for name, value in config.items() if value is not None})
    return folder


def speculators(folder: Path, found: dict[str, Tensor], **fields: Any) -> Path:
    """The layout of the package speculators, its weights in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()}
    names = sorted(own)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: own[name].contiguous() for name in inside}, folder / file)
    where = {name: file for file, inside in parts.items() for name in inside}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": LAYER,
        "draft_vocab_size": len(own["lm_head.weight"]),
        "norm_before_residual": True,
    }
    write_json(folder / "config.json", config | fields)
    return folder
