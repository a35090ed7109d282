"""Attention of chains that are unrolled from every token of a text at once (EAGLE-3's training-time test, section 3.2).

In step i the chain that starts at t asks with query t of step i; it sees the text's keys up to t, as a Visibility says, and the
chain's own keys t of steps 1 to i. Shapes: B rows, N query heads, K key/value heads, S chains, J steps, D head width.
"""

import torch
from torch import Tensor

from longspec.models.attention.backends import AUTO
from longspec.models.attention.visibility import Visibility


def attend_chains(
    q_BNSD: Tensor,
    text: tuple[Tensor, Tensor],
    own: list[tuple[Tensor, Tensor]],
    visibility: Visibility,
    scale: float,
    backend: str = AUTO,
) -> Tensor:
    """Attention output [B, N, S, D] of one step: a softmax over the text's keys and the chain's own together.

    text: keys and values of the text's first S tokens; own: of steps 1 to i; [B, K, S, D] each.
    """
    k_BKSD, v_BKSD = text
    length, groups = q_BNSD.shape[2], q_BNSD.shape[1] // k_BKSD.shape[1]
    first_BS, last_BS = visibility.bounds_BS(length, length, q_BNSD.device)
    j_S = torch.arange(length, device=q_BNSD.device)
    seen_B1SS = ((j_S >= first_BS[..., None]) & (j_S <= last_BS[..., None]))[:, None]

    def wide(x_BKSD: Tensor) -> Tensor:
        return x_BKSD.repeat_interleave(groups, 1)

    scores = [(q_BNSD @ wide(k_BKSD).transpose(2, 3) * scale).masked_fill(~seen_B1SS, -torch.inf)]
    scores += [(q_BNSD * wide(k)).sum(-1, keepdim=True) * scale for k, _ in own]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out_BNSD = weights[..., :length] @ wide(v_BKSD)
    for step, (_, v) in enumerate(own):
        out_BNSD = out_BNSD + weights[..., length + step, None] * wide(v)
    return out_BNSD
