"""GLIDE beside a Mistral target."""

from longspec.methods.glide.model import Glide


class MistralGlide(Glide):
    """`MistralGlide(config, target_model_path, glide_path=None, dtype=None)`.

    Frozen `.model` and `.lm_head`, trainable `.draft_model`. The cross attention sees all of the target's keys, also where the
    target's own last layer slides a window over them.
    """

    families = ("mistral",)
