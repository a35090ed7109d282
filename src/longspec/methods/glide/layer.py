"""Define the GLIDE draft's one decoder layer (LongSpec, arXiv 2502.17421, section 3), and its tensors' published names.

Shapes: B batch, S tokens, H hidden width, N query heads, K key/value heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from longspec.methods.glide.settings import LAST, RANDOM, Draft
from longspec.models.attention.backends import AUTO, attend
from longspec.models.attention.visibility import TreeVisibility, Visibility
from longspec.models.draft_attention import DraftAttention, draw_weights, norm_of
from longspec.models.target import whole
from longspec.models.weight_files import check_state

AnyVisibility = Visibility | TreeVisibility
FINAL_NORM = "final_layernorm"
# The published files hold keys and values of the cross attention, which are never used: the target's cache replaces them.
UNUSED = ("cross_attn.k_proj.weight", "cross_attn.k_proj.bias", "cross_attn.v_proj.weight", "cross_attn.v_proj.bias")


class GlideLayer(nn.Module):
    """Compute the trainable layer. Its state dict has the published names, without `cross_attn`'s unused keys and values.

    With `final_norm` it ends in its own norm, `final_layernorm`, which no published draft has.
    """

    def __init__(self, config: PretrainedConfig, *, final_norm: bool = False) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size, biases=True)
        self.cross_attn = DraftAttention(config, config.hidden_size, biases=True, keys_values=False)
        self.mlp = Qwen2MLP(config)  # without biases, in both families
        self.input_layernorm = norm_of(config)
        self.post_self_attention_layernorm = norm_of(config)
        self.post_cross_attention_layernorm = norm_of(config)
        self.final_layernorm = norm_of(config) if final_norm else nn.Identity()
        draw_weights(self, config.initializer_range)

    def own_keys_values(self, embedded_BSH: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys (rotated) and values of the self attention, [B, K, S, D] each, from tokens and positions alone."""
        return self.self_attn.keys_values(self.input_layernorm(embedded_BSH), rope)

    def forward(
        self,
        embedded_BSH: Tensor,
        rope: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        own_visibility: AnyVisibility,
        target_visibility: AnyVisibility,
        attention: str = AUTO,
    ) -> Tensor:
        """Return hidden states [B, S, H] for the target's head; `own` and `target` are (keys, values), [B, K, T, D] each."""
        scale = self.self_attn.head_width**-0.5
        hidden_BSH = embedded_BSH + self.self_attn(
            self.input_layernorm(embedded_BSH), rope, lambda q_BNSD: attend(q_BNSD, *own, own_visibility, scale, attention)
        )
        hidden_BSH = hidden_BSH + self.cross_attn(
            self.post_self_attention_layernorm(hidden_BSH),
            rope,
            lambda q_BNSD: attend(q_BNSD, *target, target_visibility, scale, attention),
        )
        hidden_BSH = hidden_BSH + self.mlp(self.post_cross_attention_layernorm(hidden_BSH))
        return self.final_layernorm(hidden_BSH)


def copy_target(draft: GlideLayer, states: Any, start: str) -> None:
    """Fill a fresh draft layer, in place, from the target's last or middle layer.

    Self attention, feed-forward part and the norms before them come from that layer. The cross attention reads the last layer's
    keys and values, so its queries, output and norm always come from the last layer. Biases that the target lacks stay zero.
    Raises ValueError if the layer has experts instead of one feed-forward part, norms of queries and keys, or biases that the
    draft lacks.
    """
    layers = states.target.model.layers
    chosen, last = layers[-1 if start == LAST else len(layers) // 2], layers[-1]
    parts = {"experts": not isinstance(getattr(chosen.mlp, "down_proj", None), nn.Linear)}
    parts["norms of queries and keys"] = hasattr(last.self_attn, "q_norm")
    for part in (name for name, is_there in parts.items() if is_there):
        raise ValueError(f"recipe.draft.start: {start}: that layer of the target has {part}, the draft has none; give random")
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
                if getattr(own, name) is None:
                    raise ValueError(
                        f"recipe.draft.start: {start}: that layer of the target has biases where the draft has none; set it to "
                        "random"
                    )
                getattr(own, name).copy_(whole(parameter))


def fresh_layer(states: Any, settings: Draft) -> GlideLayer:
    """Return an untrained draft layer in the target's dtype. A final norm starts as the target's, which the head expects.

    Raises ValueError if settings.start copies a layer of the target that has other parts than the draft's.
    """
    layer = GlideLayer(states.config, final_norm=settings.final_norm).to(states.head_weight.dtype)
    if settings.start != RANDOM:
        copy_target(layer, states, settings.start)
    if settings.final_norm:
        norm = states.target.model.norm
        with states.gather([norm.weight]):
            layer.final_layernorm.load_state_dict({"weight": norm.weight})
    return layer


def check_draft_state(layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
    """Raise ValueError as check_state does. The unused tensors must have their shapes, but may hold any number."""
    own = layer.state_dict()
    unused = {name: own[name.replace("cross_attn", "self_attn")] for name in UNUSED}
    about_norm = any(FINAL_NORM in name for name in own.keys() ^ state.keys())
    hint = "; recipe.draft.final_norm says whether there is a final norm" if about_norm else ""
    check_state(layer, state, source, unused, hint)


def published_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with all published names: the unused tensors are added as zeros, for strict readers."""
    unused = {name: torch.zeros_like(state[name.replace("cross_attn", "self_attn")]) for name in UNUSED}
    return dict(sorted((state | unused).items()))
