"""Rotary positions (RoPE) of a draft, by its target's frequencies or its own, turned in halves as Llama does.

Whatever order a target turns its own heads in (GLM-4's pairs are neighbours), this is how engines turn a draft's.

Shapes: B rows, N heads, S tokens, D head width, R <= D the part of a head that is turned.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from longspec.models.target import head_width


def rotations(model: Any, embedded_BSH: Tensor, position_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), [B, S, R] each, of a target's body, in the dtype and on the device of the embeddings.

    OLMo-2's module leaves them in float32. GPT-OSS's module gives the half [B, S, R / 2], of which the other is a copy.
    """
    rope = model.rotary_emb(embedded_BSH[:, :1], position_ids_BS)  # which looks at their dtype and device alone
    turned = int(head_width(model.config) * model.config.rope_parameters.get("partial_rotary_factor", 1.0))
    cos_BSR, sin_BSR = (torch.cat([x, x], dim=-1) if 2 * x.shape[-1] == turned else x for x in rope)
    return cos_BSR.to(embedded_BSH), sin_BSR.to(embedded_BSH)


def rotate(x_BNSD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to the first R of D; `rope` is (cos, sin), each [B, S, R]."""
    cos_B1SR, sin_B1SR = rope[0][:, None], rope[1][:, None]
    turned = cos_B1SR.shape[-1]
    if turned == x_BNSD.shape[-1]:
        return x_BNSD * cos_B1SR + rotate_half(x_BNSD) * sin_B1SR
    x_BNSR = x_BNSD[..., :turned]
    return torch.cat([x_BNSR * cos_B1SR + rotate_half(x_BNSR) * sin_B1SR, x_BNSD[..., turned:]], dim=-1)


class Rotation:
    """Rotations of a configuration that is not the target's, from positions.

    No module: a cast of the layer that holds it would cast its frequencies too, which turns far positions wrongly.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.modules: dict[torch.device, LlamaRotaryEmbedding] = {}

    def __call__(self, like: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, S, D], on the device and of the dtype of `like`."""
        if like.device not in self.modules:
            self.modules[like.device] = LlamaRotaryEmbedding(self.config).to(like.device)
        cos_BSD, sin_BSD = self.modules[like.device](like, positions_BS)
        return cos_BSD, sin_BSD
