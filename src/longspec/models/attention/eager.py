"""Attention with an explicit mask: the reference of the other backends, for small sizes alone.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width.
"""

import torch
from torch import Tensor

from longspec.models.attention.visibility import Visibility

LARGEST = 8192  # tokens; scores and mask grow with their square


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """Attention output [B, N, S, D], the softmax in float32 or better. Raises ValueError above LARGEST tokens."""
    queries, keys = q_BNSD.shape[2], k_BKTD.shape[2]
    check_size(queries, keys)
    first_BS, last_BS = visibility.bounds_BS(queries, keys, q_BNSD.device)
    j_T = torch.arange(keys, device=q_BNSD.device)
    seen_B11ST = ((j_T >= first_BS[..., None]) & (j_T <= last_BS[..., None]))[:, None, None]
    q_BKGSD = q_BNSD.unflatten(1, (k_BKTD.shape[1], -1))
    scores_BKGST = q_BKGSD @ k_BKTD[:, :, None].transpose(-1, -2) * scale
    if scores_BKGST.dtype != torch.float64:
        scores_BKGST = scores_BKGST.float()
    # Finite, so that a query that sees nothing makes no NaN; its weights are then cleared.
    hidden = torch.finfo(scores_BKGST.dtype).min
    weights_BKGST = scores_BKGST.masked_fill(~seen_B11ST, hidden).softmax(-1).masked_fill(~seen_B11ST, 0.0)
    return (weights_BKGST.to(v_BKTD.dtype) @ v_BKTD[:, :, None]).flatten(1, 2)


def check_size(queries: int, keys: int) -> None:
    """Raise ValueError above LARGEST tokens."""
    if queries * keys > LARGEST**2:
        raise ValueError(
            f"runtime.attention: eager would hold a mask of {queries} x {keys}; it is the reference for up to {LARGEST} tokens:"
            " set auto or sdpa"
        )
