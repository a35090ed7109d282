"""Write GGUF files as llama.cpp loads them. Only this module writes them, for targets and drafts.

Shapes: N heads, D head width, C inputs of a projection.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from torch import Tensor
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longspec.atomic_files import new_file, read_json
from longspec.models.target import head_width

DTYPES = {name: GGMLQuantizationType[name.upper()] for name in ("f32", "f16", "bf16", "q8_0")}
OF_TORCH = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type
# Names of ways to split text (tokenizer.ggml.pre); if a way has several names, the first one.
BY_REGEX = ("llama-bpe", "qwen2", "gpt-4o", "tekken", "qwen35")
DIGITS_APART, AS_GPT2 = "smollm", "gpt-2"


def names_of(layers: int) -> Callable[[str], str]:
    """Return a function: transformers' name of a tensor -> llama.cpp's. qwen3 has every part that any layer here has."""
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, layers)

    def name_of(name: str) -> str:
        found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    return name_of


def dtype_of(name: str | None, stored: str | None) -> GGMLQuantizationType:
    """Return the type of a file's matrices from --dtype; None: from the stored dtype. Raises ValueError if it is unknown."""
    chosen = name or OF_TORCH.get(str(stored), "f32")
    if chosen not in DTYPES:
        raise ValueError(f"--dtype: {chosen}: is unknown to the layout gguf; give one of {', '.join(DTYPES)}")
    return DTYPES[chosen]


def write(
    out: Path,
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    dtype: GGMLQuantizationType,
) -> None:
    """Write a GGUF file; only one tensor is in memory at a time.

    keys: relative to the architecture's name, or tokenizer.* and general.*; shapes: tensor name -> shape; read: name -> tensor.
    Matrices are written in `dtype`, vectors in float32, int64 unchanged. Raises ValueError for a matrix whose row length is no
    multiple of a quantized type's block.
    """
    types = {name: _type(name, shape, dtype) for name, shape in shapes.items()}
    with new_file(out) as beside:
        writer = GGUFWriter(beside, architecture)
        for key, value in keys.items():
            _add(writer, key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}", value)
        for name, shape in shapes.items():
            numbers, size = GGML_QUANT_SIZES[types[name]]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // numbers * size, types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in shapes.items():
            tensor = read(name)
            assert tuple(tensor.shape) == tuple(shape), name
            is_whole = types[name] == GGMLQuantizationType.I64
            writer.write_tensor_data(tensor.numpy() if is_whole else quantize(tensor.float().numpy(), types[name]))
        writer.close()


def _type(name: str, shape: tuple[int, ...], dtype: GGMLQuantizationType) -> GGMLQuantizationType:
    if name == "d2t":
        return GGMLQuantizationType.I64
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    if shape[-1] % (block := GGML_QUANT_SIZES[dtype][0]):
        raise ValueError(
            f"--dtype: {dtype.name.lower()}: {name} has rows of {shape[-1]} numbers, which is no multiple of {block}; "
            "give f16, or bf16"
        )
    return dtype


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a key, typed as llama.cpp's own converter types it."""
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Return a projection of queries or keys, or its bias, with the rows in llama.cpp's order: pairs side by side.

    transformers pairs row i of a head with row i + D/2.
    """
    width = weight.shape[0] // heads
    split_N2DC = weight.reshape(heads, 2, width // 2, *weight.shape[1:])
    return split_N2DC.transpose(1, 2).reshape(weight.shape).contiguous()


def layer_keys(config: Any, path: object) -> dict[str, Any]:
    """Return the keys of decoder layers like Llama's. Raises ValueError, with the key, for what GGUF cannot represent."""
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: hidden_act: is {config.hidden_act!r}, llama.cpp computes silu here; serve it by vLLM")
    width, rope = head_width(config), config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{path}: rope_parameters: {dict(rope)}: the layout gguf writes whole heads that turn by default, linear or "
            "llama3; serve it by vLLM"
        )
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])} if kind == "linear" else {}
    return {
        "context_length": int(config.max_position_embeddings),
        "embedding_length": int(config.hidden_size),
        "block_count": int(config.num_hidden_layers),
        "feed_forward_length": int(config.intermediate_size),
        "attention.head_count": int(config.num_attention_heads),
        "attention.head_count_kv": int(config.num_key_value_heads),
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        **scaled,
        "vocab_size": int(config.vocab_size),
    }


def rope_factors(config: Any) -> dict[str, Tensor]:
    """Return the tensor by which llama.cpp divides the rotations' frequencies; {} if they are not scaled so."""
    rope, width = config.rope_parameters, head_width(config)
    if rope["rope_type"] != "llama3":
        return {}
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float64) / width))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return {"rope_freqs.weight": (plain / scaled).float()}


def tokenizer_keys(folder: Path, tokens: int) -> dict[str, Any]:
    """Return the keys of a folder's tokenizer, for a model with `tokens` tokens.

    Raises ValueError, with the file, if the tokenizer is no byte-level BPE or splits text in a way without a known name.
    """
    file = folder / "tokenizer.json"
    content, settings = read_json(file), read_json(folder / "tokenizer_config.json")
    model = content["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError(
            f"{file}: model: is {model['type']}{' of sentencepiece' * bool(model.get('byte_fallback'))}, the layout gguf "
            "writes byte-level BPE alone; serve it by vLLM"
        )
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: each["content"] for number, each in added.items()}
    kinds = {number: CONTROL if each["special"] else USER_DEFINED for number, each in added.items()}
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(content["pre_tokenizer"], file),
        "tokenizer.ggml.tokens": [texts.get(number, f"[PAD{number}]") for number in range(tokens)],
        "tokenizer.ggml.token_type": [kinds.get(number, NORMAL if number in texts else UNUSED) for number in range(tokens)],
        "tokenizer.ggml.merges": [each if isinstance(each, str) else " ".join(each) for each in model["merges"]],
    }
    numbers = {text: number for number, text in texts.items()}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        text = settings.get(name)
        text = text["content"] if isinstance(text, dict) else text
        if text is not None:
            keys[f"tokenizer.ggml.{key}_token_id"] = numbers[text]
    keys["tokenizer.ggml.add_bos_token"] = _begins_with_special(content.get("post_processor"))
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    return keys | ({"tokenizer.chat_template": chat} if isinstance(chat, str) else {})


def _splitting(pre_tokenizer: Any, file: Path) -> str:
    """Return llama.cpp's name of a way to split text. Raises ValueError, with the file, if there is none."""
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = [(part or {}).get("type") for part in parts]
    if kinds == ["Split", "ByteLevel"]:
        regex = parts[0]["pattern"].get("Regex")
        if known := [name for name in BY_REGEX if GGUF_PRE_TOKENIZER_SPLITS.get(name) == regex]:
            return known[0]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1].get("use_regex", True):
        return DIGITS_APART
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return AS_GPT2
    raise ValueError(f"{file}: pre_tokenizer: llama.cpp has no name known here for this way to split text; serve it by vLLM")


def _begins_with_special(post_processor: Any) -> bool:
    """Tell whether a special token is put before each text."""
    each = post_processor or {}
    parts = each.get("processors", [each])
    single: list[Any] = next((part["single"] for part in parts if part.get("type") == "TemplateProcessing"), [])
    return bool(single) and "SpecialToken" in single[0]
