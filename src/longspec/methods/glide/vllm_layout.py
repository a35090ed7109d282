"""Export a GLIDE draft for vLLM's plugin longspec-vllm (plugins/vllm): a config.json next to the same weights. No torch."""

from pathlib import Path
from typing import Any

from longspec.methods.draft_files import read_draft_config, stored_settings
from longspec.methods.glide.settings import Draft

OF_THE_TARGET = ("model_type", "num_hidden_layers", "rope_parameters")  # fields that differ in the draft's config.json
# vLLM takes the lower value of draft and served target, and stops drafting after it. Server options may stretch the target; the
# plugin rotates as the served target does.
POSITIONS = 2**30


def exported(folder: Path) -> dict[str, Any]:
    """Return config.json. To vLLM the draft is a small Llama; only the plugin reads `glide`."""
    found, settings = read_draft_config(folder, "glide"), stored_settings(folder, Draft)
    assert found is not None, "longspec.draft.layouts has looked"
    assert settings is not None
    target = found[1]["target"]
    heads = {"head_dim": target["hidden_size"] // target["num_attention_heads"]}
    shapes = heads | {name: value for name, value in target.items() if name not in OF_THE_TARGET}
    return shapes | {
        "architectures": ["GlideForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "glide": {"window": settings.window, "final_norm": settings.final_norm, "target": target},
    }
