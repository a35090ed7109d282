"""Which targets there is a draft for. No torch: targets are fetched on login nodes too."""

from typing import Any

# By model type, the class that builds target and draft; recipe.model._target_ names its `from_pretrained`.
CLASSES = {
    "llama": "longspec.train.models.llama_glide.LlamaGlide",
    "mistral": "longspec.train.models.mistral_glide.MistralGlide",
    "qwen2": "longspec.train.models.qwen2_glide.Qwen2Glide",
    "qwen3": "longspec.train.models.qwen3_glide.Qwen3Glide",
    "qwen3_moe": "longspec.train.models.qwen3_glide.Qwen3Glide",
}
FAMILIES = tuple(CLASSES)  # model types

# How a rotation may be scaled. The others (dynamic, longrope) turn a token by the longest position that stands beside it
# in the batch: the target's keys then depend on what else is in the row, and no draft can be trained on them.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_family(model_type: Any, path: object) -> None:
    """Raise ValueError, naming those that are supported, for another model type than theirs."""
    if model_type not in FAMILIES:
        raise ValueError(f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")


def check_target(config: Any, path: object) -> None:
    """Hold a target's configuration (transformers' object, read from `path`) against what drafts can be trained for.

    Raises ValueError that names what is supported.
    """
    check_family(config.model_type, path)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{path}: rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{path}: quantization_config: quantized targets are not supported; give the folder of the original weights"
        )


def position_limit(config: Any) -> int:
    """Positions 0..limit-1 are the target's own; yarn may stretch them beyond max_position_embeddings."""
    rope = config.rope_parameters
    if rope["rope_type"] != "yarn":
        return int(config.max_position_embeddings)
    stretched = (rope.get("factor") or 1.0) * (rope.get("original_max_position_embeddings") or 0)
    return max(config.max_position_embeddings, int(stretched))
