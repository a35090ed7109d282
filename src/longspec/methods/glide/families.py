"""GLIDE's class for each family of targets.

All are called `(config, target_model_path, glide_path=None, dtype=None)` and have a frozen `.model` and `.lm_head` and a
trainable `.draft_model`.
"""

from longspec.methods.glide.trainer import Glide


class LlamaGlide(Glide):
    """GLIDE beside a Llama target."""

    families = ("llama",)


class MistralGlide(Glide):
    """GLIDE beside a Mistral target.

    The cross attention sees all of the target's keys, also where the target's own last layer slides a window over them.
    """

    families = ("mistral",)


class Qwen2Glide(Glide):
    """GLIDE beside a Qwen2 target (QwQ, Qwen2.5)."""

    families = ("qwen2",)


class Qwen3Glide(Glide):
    """GLIDE beside a Qwen3 target, dense or of experts.

    The target's keys come with its own key norm; the draft has the published layer, without norms of queries and keys and with
    a dense MLP of the target's `intermediate_size`.
    """

    families = ("qwen3", "qwen3_moe")


CLASSES: tuple[type[Glide], ...] = (LlamaGlide, MistralGlide, Qwen2Glide, Qwen3Glide)


def class_for(model_type: str) -> type[Glide]:
    """The class for a target of this model type, one of longspec.families."""
    return next(cls for cls in CLASSES if model_type in cls.families)
