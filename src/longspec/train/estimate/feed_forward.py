"""The feed-forward part of a target's layer in closed form, dense or of experts.

Symbols: H hidden width, I feed-forward width (of one expert), E experts, k of them for each token.
"""

from typing import Any

JOINED = ("glm4", "phi3")  # families that make gate and up by one product, whose result lives until both are used


def experts_of(config: Any, layer: int) -> tuple[int, int, int] | None:
    """Return E, k and I of one of the target's layers; None where it is dense."""
    if config.model_type == "gpt_oss":
        return config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    count = getattr(config, "num_experts", None)
    if not count or layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step:
        return None
    return count, config.num_experts_per_tok, config.moe_intermediate_size


def layer_products(config: Any, layer: int) -> int:
    """Count multiplications that one token needs."""
    hidden, experts = config.hidden_size, experts_of(config, layer)
    if experts is None:
        return int(3 * hidden * config.intermediate_size)
    count, chosen, width = experts
    return int(hidden * count + 3 * hidden * width * chosen)


def widest_elements(config: Any, layer: int) -> int:
    """Count elements a token at the widest moment, beside the 4H of residual, embeddings, norm and output.

    SwiGLU: gate, up and their product 3I. Experts, as transformers groups tokens by them (integrations/moe.py): a token's input
    once for each of its experts kH, beside gate and up together and apart 4kI, or the output, weighted, and in order again 3kH.
    GPT-OSS has copies of its biases beside these, 2kI and kH, and clamps: 5kI for three.
    """
    hidden, experts = config.hidden_size, experts_of(config, layer)
    if experts is None:
        return int((4 if config.model_type in JOINED else 3) * config.intermediate_size)
    gates, outputs = (9, 4) if config.model_type == "gpt_oss" else (4, 3)
    _, chosen, width = experts
    return int(chosen * (hidden + max(gates * width, outputs * hidden)))
