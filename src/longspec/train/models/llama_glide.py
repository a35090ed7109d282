"""GLIDE beside a Llama target."""

from longspec.methods.glide.model import Glide


class LlamaGlide(Glide):
    """`LlamaGlide(config, target_model_path, glide_path=None, dtype=None)`.

    Frozen `.model` and `.lm_head`, trainable `.draft_model`.
    """

    families = ("llama",)
