"""GLIDE beside a Qwen3 target, dense or of experts."""

from longspec.methods.glide.model import Glide


class Qwen3Glide(Glide):
    """`Qwen3Glide(config, target_model_path, glide_path=None, dtype=None)`.

    Frozen `.model` and `.lm_head`, trainable `.draft_model`. The target's keys come with its own key norm; the draft has the
    published layer, without norms of queries and keys and with a dense MLP of the target's `intermediate_size`.
    """

    families = ("qwen3", "qwen3_moe")
