"""Define the DFlash draft (arXiv 2602.06036, section 4): decoder layers that fill a block of masks in one forward; config.json.

Every layer sees the target's hidden states as more keys and values: c = hidden_norm(fc(inputs of some layers)). c is the same
for all layers, and no other norm follows it. The draft uses the target's embeddings, and its head if it has none of its own.

Facts read in vLLM 0.32 (model_executor/models/qwen3_dflash.py, v1/spec_decode/dflash.py), z-lab/dflash and llama.cpp
(conversion/qwen.py):

target_layer_ids name layers whose outputs are read, by 0-based number: one less than our numbers, which name inputs.
sliding_window counts the query itself, and applies where layer_types and use_sliding_window say so; such layers are causal in
    their block, others see all of it. All norms have rms_norm_eps.
k_norm: vLLM's CPU kernel norms the context's keys of all layers with the first layer's weight (docs/methods.md). So by default
    all layers share one weight, written for each.

Shapes: B rows, S tokens, Q queries of a row's blocks, H hidden width, N query heads, K key/value heads, D head width, V draft
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from longspec.methods.dflash.settings import ARCHITECTURE, Settings, mask_token_of
from longspec.methods.layer_config import layer_config, shape_fields
from longspec.methods.own_layers import DraftHead, OwnLayers, Rope
from longspec.models.attention.chains import KeysValues
from longspec.models.draft_attention import DraftAttention, draw_weights, norm_of
from longspec.models.target import head_width

# (layer number, rotated queries [B, N, Q, D], rotated keys and values of the blocks [B, K, Q, D]) -> output [B, N, Q, D].
Attend = Callable[[int, Tensor, KeysValues], Tensor]


class BlockAttention(DraftAttention):
    """Project with norms of each head's queries and keys. has_k_norm False: another layer's norm of keys is passed in."""

    def __init__(self, config: PretrainedConfig, *, has_k_norm: bool) -> None:
        super().__init__(config, config.hidden_size, biases=False)
        self.q_norm = norm_of(config, self.head_width)
        if has_k_norm:
            self.k_norm = norm_of(config, self.head_width)


class BlockLayer(nn.Module):
    """Compute one decoder layer. Its parameters have the names that engines load."""

    def __init__(self, config: PretrainedConfig, *, has_k_norm: bool) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, has_k_norm=has_k_norm)
        self.mlp = Qwen2MLP(config)  # without biases
        self.input_layernorm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)

    def forward(self, x_BQH: Tensor, rope: Rope, k_norm: nn.Module, attend: Callable[[Tensor, KeysValues], Tensor]) -> Tensor:
        """Return the hidden states [B, Q, H] of blocks."""
        normed_BQH = self.input_layernorm(x_BQH)
        own = self.self_attn.keys_values(normed_BQH, rope, k_norm)
        x_BQH = x_BQH + self.self_attn(normed_BQH, rope, lambda q_BNQD: attend(q_BNQD, own))
        return x_BQH + self.mlp(self.post_attention_layernorm(x_BQH))


class DFlashLayer(OwnLayers):
    """Compute a draft's blocks: the trainable module."""

    def __init__(self, config: PretrainedConfig, settings: Settings) -> None:
        super().__init__(config, settings)
        width, own = config.hidden_size, layer_config(config, settings)
        self.fc = nn.Linear(len(settings.read_of(config.num_hidden_layers)) * width, width, bias=False)
        self.hidden_norm = norm_of(own)
        self.has_k_norms = not settings.tied_k_norm  # else all layers use the first layer's
        self.layers = nn.ModuleList(
            BlockLayer(own, has_k_norm=number == 0 or self.has_k_norms) for number in range(settings.depth)
        )
        self.norm = norm_of(own)
        self.lm_head = None if settings.vocabulary is None else DraftHead(width, settings.vocabulary, bias=False)
        draw_weights(self, config.initializer_range)

    def k_norm(self, number: int) -> nn.Module:
        """Return the norm of a layer's keys: its own, or the first layer's."""
        own: Any = self.layers[number if self.has_k_norms else 0]
        return own.self_attn.k_norm

    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """Return what every layer sees of the text, [B, S, H]. taps: the target's hidden states in the order of its layers."""
        return self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1)))

    def context_keys_values(self, context_BSH: Tensor, rope: Rope) -> list[KeysValues]:
        """Return each layer's keys (normed and rotated) and values of the text, [B, K, S, D]."""
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [each.keys_values(context_BSH, rope, self.k_norm(number)) for number, each in enumerate(attentions)]

    def forward(self, x_BQH: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Return the hidden states [B, Q, H] of blocks, before the last norm, from the embeddings of their tokens."""
        for number, layer in enumerate(self.layers):
            x_BQH = layer(x_BQH, rope, self.k_norm(number), lambda q, own, number=number: attend(number, q, own))
        return x_BQH


K_NORM = "layers.{}.self_attn.k_norm.weight"


def config_fields(config: Any, settings: Settings) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError if the target lacks a layer that is read or the mask token."""
    layers = list(settings.read_of(config.num_hidden_layers))
    mask_token = mask_token_of(settings.mask_token, config.vocab_size)
    window = settings.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    fields = shape_fields(config, settings) | {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "num_hidden_layers": settings.depth,
        "block_size": settings.block_size,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": [layer - 1 for layer in layers]},
        "num_target_layers": config.num_hidden_layers,
        "layer_types": [kind] * settings.depth,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": settings.depth if window is None else 0,
        "settings": {"layers": layers, "mask_token": mask_token},
    }
    return fields if settings.vocabulary is None else fields | {"draft_vocab_size": settings.vocabulary}


def head_shape(config: Any, settings: Settings) -> tuple[int, int, int]:
    """Return query heads, key/value heads and head width of the draft's layers with a target of this configuration."""
    own = layer_config(config, settings)
    return own.num_attention_heads, own.num_key_value_heads, head_width(own)
