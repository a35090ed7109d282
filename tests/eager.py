"""The reference of all attention: explicit masks and one softmax over all scores, under the name of a backend, "eager".

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width.
"""

import torch
from torch import Tensor

from longspec.models.attention import blocks, chains
from longspec.models.attention.blocks import BlockVisibility
from longspec.models.attention.sdpa import accumulated_in
from longspec.models.attention.visibility import Visibility

EAGER = "eager"


def _seen_BST(visibility: Visibility, queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys each query sees."""
    first_BS, last_BS = visibility.bounds_BS(queries, keys, device)
    j_T = torch.arange(keys, device=device)
    return (j_T >= first_BS[..., None]) & (j_T <= last_BS[..., None])


def _weights(scores: Tensor, seen: Tensor) -> Tensor:
    """A softmax; finite where a query sees nothing, whose weights are then cleared."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~seen, 0.0)


def attend_chains(
    visibility: Visibility, scale: float, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *of_chain: Tensor
) -> Tensor:
    """One softmax over the text's keys and the chain's own, in float32 or better."""
    length, own = k_BKSD.shape[2], list(zip(of_chain[::2], of_chain[1::2], strict=True))
    seen_BSS = _seen_BST(visibility, q_BNSD.shape[2], length, q_BNSD.device)
    seen_BST = torch.cat([seen_BSS, seen_BSS.any(-1, keepdim=True).expand(-1, -1, len(own))], dim=-1)[:, None, None]
    q_BKGSD = q_BNSD.unflatten(1, (k_BKSD.shape[1], -1))
    scores = [
        q_BKGSD @ k_BKSD[:, :, None].transpose(-1, -2),
        *((q_BKGSD * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own),
    ]
    scores_BKGST = torch.cat(scores, dim=-1).to(accumulated_in(q_BNSD)) * scale
    weights_BKGST = _weights(scores_BKGST, seen_BST).to(v_BKSD.dtype)
    out_BKGSD = weights_BKGST[..., :length] @ v_BKSD[:, :, None]
    for step, (_, v) in enumerate(own):
        out_BKGSD = out_BKGSD + weights_BKGST[..., length + step, None] * v[:, :, None]
    return out_BKGSD.flatten(1, 2)


def attend_blocks(
    visibility: BlockVisibility, scale: float, q_BNQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *own: Tensor
) -> Tensor:
    """One softmax over the text's keys and all blocks'."""
    first_BQ, last_BQ = visibility.text_bounds_BQ()
    j_S, i_Q = (torch.arange(x.shape[2], device=x.device) for x in (k_BKSD, q_BNQD))
    seen_QQ = i_Q[:, None] // visibility.slots == i_Q // visibility.slots
    if visibility.window is not None:
        seen_QQ &= i_Q <= i_Q[:, None]
    seen_BQS = (j_S >= first_BQ[..., None]) & (j_S <= last_BQ[..., None])
    seen_BQT = torch.cat([seen_BQS, seen_QQ.expand(len(seen_BQS), -1, -1)], dim=-1)
    keys, values = torch.cat([k_BKSD, own[0]], dim=2), torch.cat([v_BKSD, own[1]], dim=2)
    q_BKGQD = q_BNQD.unflatten(1, (keys.shape[1], -1))
    scores_BKGQT = (q_BKGQD @ keys[:, :, None].transpose(-1, -2) * scale).to(accumulated_in(q_BNQD))
    return (_weights(scores_BKGQT, seen_BQT[:, None, None]).to(values.dtype) @ values[:, :, None]).flatten(1, 2)


chains.WAYS[EAGER] = attend_chains
blocks.WAYS[EAGER] = attend_blocks
