"""A GLIDE draft that begins as a copy of one of its target's layers (recipe.draft.start)."""

from typing import Any

import torch
from torch import nn

from longspec.methods.glide.settings import LAST


def copy_target(draft: Any, states: Any, start: str) -> None:
    """Fill a fresh draft layer, in place, from the target's last or middle layer.

    Self attention, feed-forward part and the norms before them are that layer's. The cross attention reads the keys and values
    of the last layer, so its queries, its output and the norm before it are always the last layer's. Biases that the target has
    not stay zero. Raises ValueError for a layer with experts in the place of one feed-forward part.
    """
    layers = states.target.model.layers
    chosen, last = layers[-1 if start == LAST else len(layers) // 2], layers[-1]
    if not isinstance(getattr(chosen.mlp, "down_proj", None), nn.Linear):
        raise ValueError(
            f"recipe.draft.start: {start}: that layer of the target has experts, the draft has none; set it to random"
        )
    pairs = [
        (draft.input_layernorm, chosen.input_layernorm),
        (draft.post_self_attention_layernorm, last.input_layernorm),
        (draft.post_cross_attention_layernorm, chosen.post_attention_layernorm),
        *(
            (getattr(draft.self_attn, name), getattr(chosen.self_attn, name))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        *((getattr(draft.cross_attn, name), getattr(last.self_attn, name)) for name in ("q_proj", "o_proj")),
        *((getattr(draft.mlp, name), getattr(chosen.mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    with states.gather([parameter for _, source in pairs for parameter in source.parameters()]), torch.no_grad():
        for own, source in pairs:
            for name, parameter in source.named_parameters():
                getattr(own, name).copy_(parameter)
