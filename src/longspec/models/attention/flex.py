"""Attend with torch's flex_attention, compiled; the block mask is made from each query's bounds, never from a dense mask.

Shapes: B rows, N query heads, K key/value heads, S queries, T keys, D head width, Q and L blocks of queries and of keys.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from longspec.models.attention.visibility import Visibility

BLOCK = 128
SHAPES = 64  # shapes compiled in one process; above torch's own limit, after which it stops compiling
LEAST_HEAD_WIDTH = 16  # smallest that torch's flex_attention kernels take (torch/_inductor/kernel/flex)
NO_BACKWARD = "runtime.attention: flex_attention has no backward on a CPU, so nothing trains there: set auto or sdpa"


@cache
def compiled() -> Callable[..., Any]:
    """Return flex_attention as a fused kernel for each shape. Failing to compile is an error: uncompiled it stores all scores.

    Not for trees, whose lengths change from call to call: nine lengths needed ten compilations (benchmarks/RESULTS.md).
    """
    return torch.compile(flex_attention, fullgraph=True, dynamic=False, recompile_limit=SHAPES)  # type: ignore[call-overload]


def needs_gradient(*tensors: Tensor) -> bool:
    """Tell whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def attend(
    mask: BlockMask, q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, *, with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Return output [B, N, S, D] and log-sum-exp [B, N, S], both with gradients; 0 and -inf for a query that sees no key.

    with_lse: whether the log-sum-exp is wanted; on a CPU there is none. Raises ValueError for a gradient on a CPU.
    """
    if q_BNSD.device.type == "cpu" and needs_gradient(q_BNSD, k_BKTD, v_BKTD):
        raise ValueError(NO_BACKWARD)
    settings = {"block_mask": mask, "scale": scale, "enable_gqa": q_BNSD.shape[1] != k_BKTD.shape[1]}
    seen_BNSD, beside = compiled()(q_BNSD, k_BKTD, v_BKTD, **settings, return_aux=AuxRequest(lse=with_lse))
    return seen_BNSD, beside.lse


def attend_text(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a text, or of its last S tokens, over the whole text, as `attend` does."""
    return attend(text_mask(visibility, q_BNSD, k_BKTD), q_BNSD, k_BKTD, v_BKTD, scale)


def text_mask(visibility: Visibility, q_BNSD: Tensor, k_BKTD: Tensor) -> BlockMask:
    """Return the block mask of a text, made once for its shape."""
    (rows, _, queries, _), keys = q_BNSD.shape, k_BKTD.shape[2]

    def make() -> BlockMask:
        first_BS, last_BS = (x.expand(rows, -1).contiguous() for x in visibility.bounds_BS(queries, keys, q_BNSD.device))
        return block_mask(first_BS, last_BS, keys)

    return visibility.once(("flex", rows, queries, keys), make)


def block_mask(first_BS: Tensor, last_BS: Tensor, keys: int, slots: int = 0, is_causal: bool = False) -> BlockMask:
    """Return the block mask of queries that see the keys between two bounds; no tensor is larger than blocks by blocks.

    Key blocks that a whole block of queries sees need no check of single keys. Other key blocks within reach of the block's
    bounds are visited, and the bounds decide key by key. slots: of a drafted block, whose queries also see each other, with
    is_causal only up to their own; their keys, one for each query, follow the text's.
    """
    queries = first_BS.shape[1]
    text, key_L = keys - queries, torch.arange(0, keys, BLOCK, device=first_BS.device)
    part_BQL, whole_BQL = _visited(first_BS, last_BS, keys)
    if slots:
        low_Q1 = torch.arange(0, queries, BLOCK, device=first_BS.device)[:, None]
        high_Q1 = (low_Q1 + BLOCK - 1).clamp_max(queries - 1)
        own_low_Q1, own_high_Q1 = text + low_Q1 // slots * slots, text + (high_Q1 // slots + 1) * slots - 1
        part_BQL = (part_BQL | ((own_low_Q1 <= key_L + BLOCK - 1) & (own_high_Q1 >= key_L))) & ~whole_BQL

    def sees(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= first_BS[row, query]) & (key <= last_BS[row, query])
        if slots:
            own = (key >= text) & ((key - text) // slots == query // slots)
            seen = seen | (own & (key - text <= query) if is_causal else own)
        return seen

    return BlockMask.from_kv_blocks(
        *_listed(part_BQL), *_listed(whole_BQL), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def _visited(first_BS: Tensor, last_BS: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return which blocks of keys each block of queries visits: in part, and whole; bool [B, Q, L]. keys: their number."""
    sees_BS = last_BS >= first_BS
    key_blocks = torch.arange(0, keys, BLOCK, device=first_BS.device)
    lowest_BQ1 = -_largest(-first_BS.where(sees_BS, keys), -keys)
    highest_BQ1 = _largest(last_BS.where(sees_BS, -1), -1)
    whole_BQL = (_largest(first_BS.where(sees_BS, keys), 0) <= key_blocks) & (
        -_largest(-last_BS.where(sees_BS, -1), -keys) >= key_blocks + BLOCK - 1
    )
    part_BQL = (lowest_BQ1 <= key_blocks + BLOCK - 1) & (highest_BQ1 >= key_blocks) & ~whole_BQL
    return part_BQL, whole_BQL


def _largest(x_BS: Tensor, filler: int) -> Tensor:
    """Return the largest value in each block of queries, [B, Q, 1]; missing queries of the last block count as `filler`."""
    return F.pad(x_BS, (0, -x_BS.shape[1] % BLOCK), value=filler).unflatten(1, (-1, BLOCK)).amax(-1, keepdim=True)


def _listed(is_visited_BQL: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each block of queries visits, int32 [B, 1, Q], and their numbers first, int32 [B, 1, Q, L]."""
    order_BQL = is_visited_BQL.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_visited_BQL.sum(-1, dtype=torch.int32)[:, None], order_BQL.to(torch.int32)[:, None]
