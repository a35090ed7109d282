"""The draft layer written out in plain PyTorch with dense masks, from the published formulas alone.

Shapes: S tokens, H hidden width, N query heads, K key/value heads, D head width, V vocabulary. One row at a time.
"""

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def rms_norm(x_SH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return weight_H * x_SH / torch.sqrt(x_SH.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x_NSD: Tensor, positions_S: Tensor, theta: float) -> Tensor:
    half = x_NSD.shape[-1] // 2
    angle = positions_S[:, None].double() / theta ** (torch.arange(half).double() / half)
    cos, sin = angle.cos().to(x_NSD), angle.sin().to(x_NSD)
    left, right = x_NSD[..., :half], x_NSD[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def heads(x_SE: Tensor, count: int) -> Tensor:
    return x_SE.view(x_SE.shape[0], count, -1).transpose(0, 1)


def attention(q_NSD: Tensor, k_KSD: Tensor, v_KSD: Tensor, seen_SS: Tensor) -> Tensor:
    repeat = q_NSD.shape[0] // k_KSD.shape[0]
    k_NSD, v_NSD = k_KSD.repeat_interleave(repeat, 0), v_KSD.repeat_interleave(repeat, 0)
    scores = (q_NSD @ k_NSD.transpose(1, 2) / math.sqrt(q_NSD.shape[-1])).masked_fill(~seen_SS, -1e30)
    out_NSD = scores.softmax(-1) @ v_NSD
    # A query that sees nothing gets nothing.
    return torch.where(seen_SS.any(-1)[None, :, None], out_NSD, 0.0).transpose(0, 1).flatten(1)


def draft_hidden(
    state: State,
    embedded_SH: Tensor,
    positions_S: Tensor,
    target_keys_KSD: Tensor,
    target_values_KSD: Tensor,
    own_seen_SS: Tensor,
    target_seen_SS: Tensor,
    shape: tuple[int, int],
    eps: float,
    theta: float,
) -> Tensor:
    """h3 of facts: embed -> windowed self attention -> cross attention to the target's last layer -> SwiGLU."""

    def linear(name: str, x_SE: Tensor) -> Tensor:
        bias = state.get(f"{name}.bias")
        y = x_SE @ state[f"{name}.weight"].T
        return y if bias is None else y + bias

    num_heads, num_kv = shape
    h0 = embedded_SH
    x = rms_norm(h0, state["input_layernorm.weight"], eps)
    q = rotate(heads(linear("self_attn.q_proj", x), num_heads), positions_S, theta)
    k = rotate(heads(linear("self_attn.k_proj", x), num_kv), positions_S, theta)
    v = heads(linear("self_attn.v_proj", x), num_kv)
    h1 = h0 + linear("self_attn.o_proj", attention(q, k, v, own_seen_SS))
    x = rms_norm(h1, state["post_self_attention_layernorm.weight"], eps)
    q = rotate(heads(linear("cross_attn.q_proj", x), num_heads), positions_S, theta)
    h2 = h1 + linear("cross_attn.o_proj", attention(q, target_keys_KSD, target_values_KSD, target_seen_SS))
    x = rms_norm(h2, state["post_cross_attention_layernorm.weight"], eps)
    gate = torch.nn.functional.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
    return h2 + linear("mlp.down_proj", gate)
