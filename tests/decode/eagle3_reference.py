"""EAGLE-3's chains as plain dense algebra on the draft's named weights: one chain at a time, a softmax over what it sees."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache
def own_states(target: Any, text: tuple[int, ...]) -> tuple[Tensor, ...]:
    """transformers' hidden states of a text, [T, H] each, layer by layer."""
    with torch.no_grad():
        return tuple(states[0] for states in target(torch.tensor([text]), output_hidden_states=True).hidden_states)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x_NSD: Tensor, target: Any, positions_S: Tensor) -> Tensor:
    cos_SD, sin_SD = (turn[0] for turn in target.model.rotary_emb(x_NSD, positions_S[None]))
    first, second = x_NSD.chunk(2, dim=-1)
    return x_NSD * cos_SD + torch.cat([-second, first], dim=-1) * sin_SD


@torch.no_grad()
def chain_logits(drafter: Any, text: list[int], drafted: list[int]) -> Tensor:
    """The draft's logits [1 + len(drafted), V] after a text and after each token drafted behind it.

    The slots of the text are step 0: slot t of token t + 1, with the target's hidden states of token t. Step i of the chain
    that starts in the last slot stands i further, fed with the hidden state of step i - 1. A query sees all slots that lie
    less than the window before it.
    """
    target, settings, weight = drafter.target, drafter.settings, drafter.layer.state_dict()
    config, slots = target.config, len(text) - 1
    groups = config.num_attention_heads // config.num_key_value_heads

    def norm(name: str, x: Tensor) -> Tensor:
        return normed(x, weight[f"{name}.weight"], config.rms_norm_eps)

    def projected(name: str, x: Tensor) -> Tensor:
        return x @ weight[f"midlayer.{name}.weight"].T

    def heads(name: str, x_SE: Tensor) -> Tensor:
        count = config.num_attention_heads if name == "q" else config.num_key_value_heads
        return projected(f"self_attn.{name}_proj", x_SE).unflatten(-1, (count, -1)).transpose(0, 1)

    auxiliary = [own_states(target, tuple(text[:-1]))[layer] for layer in settings.layers]
    if settings.fc_norm:
        auxiliary = [norm(f"fc_norm.{place}", x) for place, x in enumerate(auxiliary)]
    feature_SH = torch.cat(auxiliary, dim=-1) @ weight["fc.weight"].T
    tokens_S, positions_S = torch.tensor(text[1:]), torch.arange(slots)
    keys, values, positions, logits = [], [], [], []
    for step in range(1 + len(drafted)):
        embedded_SH = target.model.embed_tokens.weight[tokens_S]
        both_SE = torch.cat([norm("midlayer.input_layernorm", embedded_SH), norm("midlayer.hidden_norm", feature_SH)], -1)
        keys.append(rotated(heads("k", both_SE), target, positions_S))
        values.append(heads("v", both_SE))
        positions.append(positions_S)
        q_N1D = rotated(heads("q", both_SE), target, positions_S)[:, -1:]
        keys_NTD, values_NTD = (torch.cat(parts, dim=1).repeat_interleave(groups, 0) for parts in (keys, values))
        scores_NT = (q_N1D * keys_NTD).sum(-1) / q_N1D.shape[-1] ** 0.5
        if settings.sliding_window:
            scores_NT[:, positions_S[-1] - torch.cat(positions) >= settings.sliding_window] = -torch.inf
        mixed_ND = (scores_NT.softmax(-1)[..., None] * values_NTD).sum(1)
        hidden_H = feature_SH[-1] + projected("self_attn.o_proj", mixed_ND.flatten())
        x_H = norm("midlayer.post_attention_layernorm", hidden_H)
        gate = projected("mlp.gate_proj", x_H)
        hidden_H = hidden_H + projected("mlp.down_proj", gate * gate.sigmoid() * projected("mlp.up_proj", x_H))
        logits.append(weight["lm_head.weight"] @ norm("norm", hidden_H))
        if step < len(drafted):
            feature_SH = (norm("norm", hidden_H) if settings.norm_output else hidden_H)[None]
            tokens_S, positions_S = torch.tensor([drafted[step]]), torch.tensor([slots + step])
    return torch.stack(logits)
