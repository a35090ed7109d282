"""GLIDE beside a Qwen2 target (QwQ, Qwen2.5)."""

from longspec.methods.glide.model import Glide


class Qwen2Glide(Glide):
    """`Qwen2Glide(config, target_model_path, glide_path=None, dtype=None)`.

    Frozen `.model` and `.lm_head`, trainable `.draft_model`.
    """

    families = ("qwen2",)
