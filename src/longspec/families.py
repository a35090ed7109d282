"""Targets that drafts can be trained for. No torch: login nodes fetch targets too.

This module checks what all methods need of a target. A method's settings module names the families that it takes (FAMILIES).
"""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gpt_oss", "olmo2", "glm4")  # model types
# transformers' model type by a GGUF file's general.architecture, for the architectures that targets are made from.
OF_GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

# Supported scalings of a rotation. The others (dynamic, longrope) rotate by the longest position in the batch: the target's
# keys then depend on the other rows, and no draft can be trained on them.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json; the second is of older compressed-tensors


def check_family(model_type: Any, path: object) -> None:
    """Raise ValueError, with the supported ones, for any other model type."""
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{path}: model_type {model_type!r} is not supported (see docs/families.md); supported are {known}")


def check_target(config: Any, path: object) -> None:
    """Check that drafts can be trained for a target. config: transformers' object, read from `path`.

    Raises ValueError that names what is supported.
    """
    content = {key: getattr(config, key, None) for key in QUANTIZED}
    check_content(content | {"model_type": config.model_type, "rope_parameters": config.rope_parameters}, path)


def check_content(content: Mapping[str, Any], path: object) -> None:
    """Raise ValueError if a config.json has an unsupported family or rotation, or quantized weights."""
    check_family(content.get("model_type"), path)
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{path}: rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    for key in QUANTIZED:
        if (found := content.get(key)) is not None:
            method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            kind = getattr(method, "value", method) or "of no quant_method"
            raise ValueError(
                f"{path}: {key}: quantized targets are not supported ({kind}): a frozen target's head and layers are read as "
                "plain matrices here; give the folder of the original weights, or make it as docs/families.md shows"
            )


def position_limit(config: Any) -> int:
    """Return how many positions are the target's own, 0..limit-1; yarn may stretch them beyond max_position_embeddings."""
    rope = config.rope_parameters
    if rope["rope_type"] != "yarn":
        return int(config.max_position_embeddings)
    stretched = (rope.get("factor") or 1.0) * (rope.get("original_max_position_embeddings") or 0)
    return max(config.max_position_embeddings, int(stretched))


def layer_windows(config: Any) -> list[int | None]:
    """Return how many tokens a query sees in each of a target's layers, itself among them; None: all."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [size if kind == "sliding_attention" else None for kind in kinds]
