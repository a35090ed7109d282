"""Define attention of a draft's layer: its projections, and rotary positions (RoPE) with its target's frequencies or its own.

A draft's heads rotate in halves, as Llama's do, even if its target rotates otherwise (GLM-4 rotates neighbours): engines rotate
a draft's heads in halves.

Shapes: B rows, S tokens, N query heads, K key/value heads, D head width, R <= D the part of a head that is turned.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from longspec.models.target import head_width


def rotations(model: Any, embedded_BSH: Tensor, position_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), [B, S, R] each, of a target's body, in the dtype and on the device of the embeddings.

    OLMo-2's module leaves them in float32. GPT-OSS's module returns one half [B, S, R / 2]; the other half equals it.
    """
    rope = model.rotary_emb(embedded_BSH[:, :1], position_ids_BS)  # the module reads only their dtype and device
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
    """Compute rotations of a configuration that is not the target's, from positions.

    This is no module: a cast of the layer that holds it would cast its frequencies too, and rotate far positions wrongly.
    """

    def __init__(self, config: Any) -> None:
        # Only these fields: the target's configuration may have others with which transformers changes the rotation.
        self.config = LlamaConfig(
            head_dim=head_width(config),
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self.modules: dict[torch.device, LlamaRotaryEmbedding] = {}

    def __call__(self, like: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [B, S, D], on the device and in the dtype of `like`."""
        if like.device not in self.modules:
            self.modules[like.device] = LlamaRotaryEmbedding(self.config).to(like.device)
        cos_BSD, sin_BSD = self.modules[like.device](like, positions_BS)
        return cos_BSD, sin_BSD


def norm_of(config: Any, width: int | None = None) -> LlamaRMSNorm:
    """Return an RMS norm with the configuration's epsilon. width: of its input, None: the hidden width."""
    return LlamaRMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)


def draw_weights(module: nn.Module, std: float) -> None:
    """Draw the weights of all projections; biases start at zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class DraftAttention(nn.Module):
    """Project from inputs of width E, and back to the target's hidden width H.

    biases: of queries, keys and values; keys_values: whether it has its own keys and values.
    """

    def __init__(self, config: Any, inputs: int, *, biases: bool, keys_values: bool = True) -> None:
        super().__init__()
        self.head_width = head_width(config)
        query_width, key_width = config.num_attention_heads * self.head_width, config.num_key_value_heads * self.head_width
        # Each projection draws random numbers when it is made: another order would give other fresh drafts.
        self.q_proj = nn.Linear(inputs, query_width, bias=biases)
        if keys_values:
            self.k_proj = nn.Linear(inputs, key_width, bias=biases)
            self.v_proj = nn.Linear(inputs, key_width, bias=biases)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()

    def _heads(self, x_BSE: Tensor) -> Tensor:
        return x_BSE.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def keys_values(self, x_BSE: Tensor, rope: tuple[Tensor, Tensor], k_norm: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return keys (normed by k_norm and rotated) and values [B, K, S, D]."""
        k_BKSD = self._heads(self.k_proj(x_BSE))
        return rotate(k_BKSD if k_norm is None else k_norm(k_BKSD), rope), self._heads(self.v_proj(x_BSE))

    def forward(self, x_BSE: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [B, S, H]: rotated queries, attended and projected back. attend: queries -> output, both [B, N, S, D]."""
        seen_BNSD = attend(rotate(self.q_norm(self._heads(self.q_proj(x_BSE))), rope))
        return self.o_proj(seen_BNSD.transpose(1, 2).flatten(2))
