"""DFlash's training forward written out in plain PyTorch, block by block, from the published formulas alone.

One document at a time, whose tokens stand at positions 0, 1, ... Shapes: S tokens, W slots of a block, H hidden width, N query
heads, K key/value heads, D head width, L keys, T target's vocabulary, V draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.methods.eagle3_reference import Text, turned
from tests.reference import State, rms_norm


@dataclass
class Draft:
    state: State
    heads: tuple[int, int]
    eps: float
    mask_H: Tensor
    target_head_TH: Tensor
    ids: list[int]
    slots: int
    depth: int
    loss: str
    # Of each predicted slot's probability of the text's token, None where it has no label.
    weights: Callable[[list[float | None]], list[float]]
    window: int | None = None


@dataclass
class Sums:
    """Over the blocks of a document; by predicted slot, without weights, but for `weighted`."""

    weighted: Tensor
    losses: list[Tensor] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    agreements: list[int] = field(default_factory=list)
    blocks: int = 0
    leading_hits: int = 0


def context(draft: Draft, text: Text) -> Tensor:
    return rms_norm(
        torch.cat(text.auxiliary, dim=-1) @ draft.state["fc.weight"].T, draft.state["hidden_norm.weight"], draft.eps
    )


def key_value(draft: Draft, layer: int, x_H: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weight = {name: draft.state[f"layers.{layer}.self_attn.{name}_proj.weight"] for name in "kv"}
    norm = draft.state.get(f"layers.{layer}.self_attn.k_norm.weight", draft.state["layers.0.self_attn.k_norm.weight"])
    k_KD = rms_norm((x_H @ weight["k"].T).view(draft.heads[1], -1), norm, draft.eps)
    return turned(k_KD, rope), (x_H @ weight["v"].T).view(draft.heads[1], -1)


def block(draft: Draft, text: Text, anchor: int, context_SH: Tensor) -> Tensor:
    """The last norm's output [W, H] of the slots of one block."""
    x_WH = torch.stack([text.embedded_SH[anchor], *[draft.mask_H] * (draft.slots - 1)])
    groups = draft.heads[0] // draft.heads[1]
    for layer in range(draft.depth):
        weight = {name: x for name, x in draft.state.items() if name.startswith(f"layers.{layer}.")}
        of = {name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): x for name, x in weight.items()}
        normed_WH = rms_norm(x_WH, of["input_layernorm"], draft.eps)
        text_keys = [key_value(draft, layer, context_SH[place], text.rope(place)) for place in range(anchor)]
        own_keys = [key_value(draft, layer, normed_WH[slot], text.rope(anchor + slot)) for slot in range(draft.slots)]
        rows = []
        for slot in range(draft.slots):
            seen = [*text_keys, *own_keys]
            if draft.window is not None:
                place = anchor + slot
                seen = [*text_keys, *own_keys][: place + 1][max(0, place - draft.window + 1) :]
            q_ND = (normed_WH[slot] @ of["self_attn.q_proj"].T).view(draft.heads[0], -1)
            q_ND = turned(rms_norm(q_ND, of["self_attn.q_norm"], draft.eps), text.rope(anchor + slot))
            k_LND, v_LND = (torch.stack(list(x)).repeat_interleave(groups, dim=1) for x in zip(*seen, strict=True))
            weights_LN = (torch.einsum("nd,lnd->ln", q_ND, k_LND) / math.sqrt(q_ND.shape[-1])).softmax(0)
            rows.append(torch.einsum("ln,lnd->nd", weights_LN, v_LND).flatten())
        x_WH = x_WH + torch.stack(rows) @ of["self_attn.o_proj"].T
        u_WH = rms_norm(x_WH, of["post_attention_layernorm"], draft.eps)
        x_WH = x_WH + (silu(u_WH @ of["mlp.gate_proj"].T) * (u_WH @ of["mlp.up_proj"].T)) @ of["mlp.down_proj"].T
    return rms_norm(x_WH, draft.state["norm.weight"], draft.eps)


def anchors_of(text: Text) -> list[int]:
    return [place for place in range(len(text.labels_S) - 1) if text.labels_S[place + 1] != -100]


def document_sums(draft: Draft, text: Text, anchors: list[int]) -> Sums:
    """Losses, and what is counted, of the blocks at these anchors."""
    context_SH, predicted = context(draft, text), draft.slots - 1
    head_VH = draft.state.get("lm_head.weight", draft.target_head_TH[draft.ids])
    sums = Sums(context_SH.new_zeros(()))
    sums.losses = [context_SH.new_zeros(()) for _ in range(predicted)]
    sums.reached, sums.inside, sums.agreements = ([0] * predicted for _ in range(3))
    for anchor in anchors:
        hidden_WH = block(draft, text, anchor, context_SH)
        losses, likely, leads = dict[int, Tensor](), list[float | None](), True
        for slot in range(predicted):
            token = anchor + 1 + slot
            if token >= len(text.labels_S) or text.labels_S[token] == -100:
                likely.append(None)
                leads = False
                continue
            label, teacher_T = int(text.labels_S[token]), draft.target_head_TH @ text.final_SH[token - 1]
            log_q_V = (head_VH @ hidden_WH[slot + 1]).log_softmax(0)
            said = draft.ids[int(log_q_V.argmax())]
            leads = leads and said == label
            sums.leading_hits += leads
            sums.reached[slot] += 1
            sums.agreements[slot] += said == int(teacher_T.argmax())
            likely.append(float(log_q_V[draft.ids.index(label)].detach().exp()) if label in draft.ids else 0.0)
            to_learn = label if draft.loss == "hard" else int(teacher_T.argmax())
            if to_learn in draft.ids:
                sums.inside[slot] += 1
                p_V = teacher_T[draft.ids].softmax(0)
                losses[slot] = -log_q_V[draft.ids.index(label)] if draft.loss == "hard" else -(p_V * log_q_V).sum()
        for slot, loss in losses.items():
            sums.losses[slot] = sums.losses[slot] + loss
            sums.weighted = sums.weighted + draft.weights(likely)[slot] * loss
        sums.blocks += 1
    return sums


def falling(gamma: float) -> Callable[[list[float | None]], list[float]]:
    """exp(-(k - 1) / gamma) of slot k, which add up to 1."""

    def weights(likely: list[float | None]) -> list[float]:
        found = [math.exp(-slot / gamma) for slot in range(len(likely))]
        return [each / sum(found) for each in found]

    return weights


def d_pace(alpha: float) -> Callable[[list[float | None]], list[float]]:
    """arXiv 2605.18810: the sum over j >= k of the products of s_1 .. s_j."""

    def weights(likely: list[float | None]) -> list[float]:
        products, product = [], 1.0
        for q in likely:
            product *= 1.0 if q is None else (1 - alpha) * q + alpha
            products.append(0.0 if q is None else product)
        return [sum(products[slot:]) for slot in range(len(likely))]

    return weights
