"""EAGLE-3's training forward written out in plain PyTorch, chain by chain, from the published formulas alone.

One document at a time, whose tokens stand at positions 0, 1, ... Shapes: S tokens, H hidden width, N query heads, K key/value
heads, D head width, T target's vocabulary, V draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.reference import State, rms_norm

Rope = Callable[[int], tuple[Tensor, Tensor]]  # position -> cos and sin [D]


@dataclass
class Text:
    """What a draft is told of a document; labels -100 where a token is none."""

    embedded_SH: Tensor
    auxiliary: list[Tensor]
    final_SH: Tensor
    labels_S: Tensor
    rope: Rope


@dataclass
class Draft:
    state: State
    heads: tuple[int, int]
    eps: float
    head_TH: Tensor
    ids: list[int]
    steps: int
    decay: float
    window: int | None = None
    norm_output: bool = False
    norm_before_residual: bool = False


@dataclass
class Sums:
    """Sums of one document; of all steps [steps], without weights."""

    losses: list[Tensor] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    agreements: list[int] = field(default_factory=list)


def turned(x_ND: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x_ND.chunk(2, dim=-1)
    return x_ND * rope[0] + torch.cat([-right, left], dim=-1) * rope[1]


def features(draft: Draft, text: Text) -> Tensor:
    state, auxiliary = draft.state, text.auxiliary
    if "input_norm.weight" in state:
        auxiliary = list(rms_norm(torch.cat(auxiliary, dim=-1), state["input_norm.weight"], draft.eps).chunk(3, dim=-1))
    if "fc_norm.0.weight" in state:
        auxiliary = [rms_norm(x, state[f"fc_norm.{number}.weight"], draft.eps) for number, x in enumerate(auxiliary)]
    return torch.cat(auxiliary, dim=-1) @ state["fc.weight"].T


def chain(draft: Draft, text: Text, start: int, feature_H: Tensor, keys: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Hidden states [H] of the steps of the chain that starts at a token; keys: of the text's tokens, its own added."""
    state, hidden, own = draft.state, [], []
    groups = draft.heads[0] // draft.heads[1]
    for step in range(draft.steps):
        if start + 1 + step >= len(text.embedded_SH):
            return hidden
        embedded_H = rms_norm(text.embedded_SH[start + 1 + step], state["midlayer.input_layernorm.weight"], draft.eps)
        normed_H = rms_norm(feature_H, state["midlayer.hidden_norm.weight"], draft.eps)
        both = torch.cat([embedded_H, normed_H])
        q, k, v = (both @ state[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        rope = text.rope(start + step)
        q_ND = turned(q.view(draft.heads[0], -1), rope)
        k_KD, v_KD = turned(k.view(draft.heads[1], -1), rope), v.view(draft.heads[1], -1)
        (own if step else keys).append((k_KD, v_KD))
        assert len(keys) == start + 1
        first = 0 if draft.window is None else max(0, start + step - draft.window + 1)
        seen = keys[first:] + own
        k_JND, v_JND = (torch.stack(list(x)).repeat_interleave(groups, dim=1) for x in zip(*seen, strict=True))
        weights_JN = (torch.einsum("nd,jnd->jn", q_ND, k_JND) / math.sqrt(q_ND.shape[-1])).softmax(0)
        attended = torch.einsum("jn,jnd->nd", weights_JN, v_JND).flatten()
        hidden_H = (normed_H if draft.norm_before_residual else feature_H) + attended @ state[
            "midlayer.self_attn.o_proj.weight"
        ].T
        x_H = rms_norm(hidden_H, state["midlayer.post_attention_layernorm.weight"], draft.eps)
        gate, up, down = (state[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden_H = hidden_H + (silu(x_H @ gate.T) * (x_H @ up.T)) @ down.T
        hidden.append(hidden_H)
        feature_H = rms_norm(hidden_H, state["norm.weight"], draft.eps) if draft.norm_output else hidden_H
    return hidden


def document_sums(draft: Draft, text: Text) -> Sums:
    """Losses, and what is counted, of all chains of a document."""
    feature_SH, keys = features(draft, text), []
    chains = [chain(draft, text, start, feature_SH[start], keys) for start in range(len(feature_SH) - 1)]
    sums = Sums()
    for step in range(draft.steps):
        loss, inside, reached, agreements = text.embedded_SH.new_zeros(()), 0, 0, 0
        for start, hidden in enumerate(chains):
            token = start + 2 + step  # that is predicted
            if token >= len(text.labels_S) or text.labels_S[token] == -100:
                continue
            reached += 1
            teacher_T = draft.head_TH @ text.final_SH[token - 1]
            logits_V = draft.state["lm_head.weight"] @ rms_norm(hidden[step], draft.state["norm.weight"], draft.eps)
            agreements += draft.ids[int(logits_V.argmax())] == int(teacher_T.argmax())
            if int(teacher_T.argmax()) in draft.ids:
                inside += 1
                loss = loss - (teacher_T[draft.ids].softmax(0) * logits_V.log_softmax(0)).sum()
        sums.losses.append(loss)
        sums.inside.append(inside)
        sums.reached.append(reached)
        sums.agreements.append(agreements)
    return sums


def weighted(draft: Draft, sums: list[Sums]) -> Tensor:
    """The loss of documents: step i weighted decay^i."""
    return torch.stack([draft.decay**step * each.losses[step] for each in sums for step in range(draft.steps)]).sum()
