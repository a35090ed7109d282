"""Small GGUF files, written by the package gguf as llama.cpp's converter lays them out, of random transformers models."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 2.0**-17, "rope_theta": 5000.0}
SHAPE |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32}
CONFIGS: dict[str, Any] = {  # general.architecture -> the model
    "llama": lambda: LlamaConfig(**SHAPE, vocab_size=len(TOKENS), tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, vocab_size=len(TOKENS)),
    "qwen3": lambda: Qwen3Config(**SHAPE, vocab_size=len(TOKENS), head_dim=32),
    "qwen3moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, vocab_size=len(TOKENS)),
}
WHOLE_KEYS = ("split.count", "tokenizer.ggml.padding_token_id")  # of no architecture
PRE = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
_SPELLED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that a byte-level vocabulary writes as they are
_BYTES = {byte: chr(byte) for byte in _SPELLED} | {
    byte: chr(256 + at) for at, byte in enumerate(byte for byte in range(256) if byte not in _SPELLED)
}
SPACES = _BYTES[32] * 2
TOKENS = [*(_BYTES[byte] for byte in range(256)), "<|im_start|>", "<|im_end|>", SPACES, "th", "the"]
MERGES = [f"{_BYTES[32]} {_BYTES[32]}", "t h", "th e"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {  # transformers' name -> llama.cpp's
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def random_model(architecture: str) -> Any:
    """A model whose weights float16 holds exactly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).float().eval()
    for weight in model.parameters():
        weight.data = (torch.randn_like(weight) * 0.1 + (weight.dim() == 1)).half().float()
    model.tie_weights()
    return model


def write(
    path: Path, model: Any, kind: str, without: tuple[str, ...] = (), more: dict[str, Any] | None = None, pre: str | None = None
) -> Path:
    """Write a model as GGUF with its matrices as `kind` (F16, Q8_0).

    without: names of keys and tensors to leave out; more: keys of the architecture, and tensors (arrays) by their names.
    """
    architecture = next(name for name, config in CONFIGS.items() if isinstance(model.config, type(config())))
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_keys(model.config) | (more or {})).items():
        if key not in without and not isinstance(value, np.ndarray):
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key if key in WHOLE_KEYS else f"{architecture}.{key}", value)
    if "tokenizer" not in without:
        _write_tokenizer(writer, pre or PRE[architecture])
    added = {key: value for key, value in (more or {}).items() if isinstance(value, np.ndarray)}
    tensors = _tensors(model, architecture) | added
    for name, tensor in tensors.items():
        if name in without or (name == "output.weight" and model.config.tie_word_embeddings):
            continue
        as_kind = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: Any) -> dict[str, Any]:
    """The architecture's keys, as llama.cpp's converter writes them."""
    keys = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config.model_type == "llama":
        keys |= {"rope.dimension_count": config.head_dim}
    if config.model_type.startswith("qwen3"):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.model_type == "qwen3_moe":
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
    return keys


def _write_tokenizer(writer: Any, pre: str) -> None:
    """A byte-level vocabulary with three merges and two control tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names and in its order of rows."""
    config, found = model.config, {}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if name in NAMES:
            found[NAMES[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate.copy(), f"blk.{layer}.ffn_up_exps.weight": up.copy()}
            continue
        part, end = (rest, "weight") if rest in NAMES else rest.rsplit(".", 1)
        if architecture == "llama" and part.endswith(("q_proj", "k_proj")):
            array = _interleaved(array, config.num_attention_heads if "q_proj" in part else config.num_key_value_heads)
        found[f"blk.{layer}.{NAMES[part]}.{end}"] = array
    return found


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring rows of a head together, transformers those half a head apart."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
