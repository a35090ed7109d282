"""Attention by torch's scaled_dot_product_attention: fused causal calls where a segment allows it, else blocks of queries.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width, Q queries and L keys of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.models.attention.visibility import Segment, Visibility, additive, is_hidden, nothing_seen

# Queries handled at once where a mask is needed: a mask of [block, keys] is the largest there is.
QUERY_BLOCK = 256


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """Attention output [B, N, S, D]. Rows of the same segments share their calls."""
    rows_of: dict[tuple[Segment, ...], list[int]] = {}
    segments = visibility.segments(q_BNSD.shape[2], k_BKTD.shape[2])
    if not any(segments):
        return nothing_seen(q_BNSD, k_BKTD, v_BKTD)
    for row, segments_of_row in enumerate(segments):
        rows_of.setdefault(tuple(segments_of_row), []).append(row)
    if len(rows_of) == 1:
        return _attend_alike(q_BNSD, k_BKTD, v_BKTD, list(segments[0]), visibility, scale)
    parts = []
    for alike, rows in rows_of.items():
        q, k, v = (x[rows[0] : rows[0] + 1] if len(rows) == 1 else x[rows] for x in (q_BNSD, k_BKTD, v_BKTD))
        parts.append(_attend_alike(q, k, v, list(alike), visibility, scale))
    order = [row for rows in rows_of.values() for row in rows]
    seen_BNSD = torch.cat(parts)
    return seen_BNSD if order == sorted(order) else seen_BNSD[torch.tensor(order).argsort().to(seen_BNSD.device)]


def _attend_alike(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, segments: list[Segment], visibility: Visibility, scale: float
) -> Tensor:
    """Attention output [B, N, S, D] of rows that have these segments in common."""
    parts, done = [], 0
    nothing_BNSD = v_BKTD.new_zeros(1, 1, 1, 1).expand(*q_BNSD.shape[:3], v_BKTD.shape[-1])
    masks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for segment in segments:
        parts.append(nothing_BNSD[:, :, done : segment.start])
        q = q_BNSD[:, :, segment.start : segment.stop]
        k, v = (x[:, :, segment.key_start : segment.key_stop] for x in (k_BKTD, v_BKTD))
        plain = visibility.lag_blocks is None and not segment.is_windowed
        if plain and q.shape[2] in (1, k.shape[2]):
            parts.append(_attend_causal(q, k, v, scale))
        else:
            parts += _attend_in_blocks(q, k, v, segment, visibility.lag_blocks, scale, masks)
        done = segment.stop
    parts.append(nothing_BNSD[:, :, done:])
    parts = [part for part in parts if part.shape[2]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_causal(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    """One fused call without a mask: as many queries as keys, or one."""
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    if groups > 1 and q_BNSD.device.type == "cuda" and q_BNSD.dtype not in (torch.bfloat16, torch.float16):
        # On a GPU only half precision's kernel takes groups; for others torch would hold the scores of all pairs.
        k_BKTD, v_BKTD, groups = k_BKTD.repeat_interleave(groups, 1), v_BKTD.repeat_interleave(groups, 1), 1
    causal = q_BNSD.shape[2] > 1
    return F.scaled_dot_product_attention(q_BNSD, k_BKTD, v_BKTD, is_causal=causal, scale=scale, enable_gqa=groups > 1)


def _attend_in_blocks(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    segment: Segment,
    lag_blocks: int | None,
    scale: float,
    masks: dict[tuple[int, ...], tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """One segment, block after block of queries against only the keys that causality and window leave."""
    num_queries, num_keys = q_BNSD.shape[2], k_BKTD.shape[2]
    groups, parts = q_BNSD.shape[1] // k_BKTD.shape[1], []
    for start in range(0, num_queries, QUERY_BLOCK):
        q = q_BNSD[:, :, start : start + QUERY_BLOCK]
        high = num_keys - num_queries + start + q.shape[2]
        low = 0 if segment.window is None else max(0, high - q.shape[2] - segment.window)
        k, v = k_BKTD[:, :, low:high], v_BKTD[:, :, low:high]
        shape = q.shape[2], high - low, groups
        if segment.window is None:
            parts.append(_attend_growing(q, k, v, lag_blocks, scale))
            continue
        # Blocks inside a document have one mask in common, which autograd then keeps once.
        key = *shape, low if lag_blocks else 0
        if key not in masks:
            masks[key] = _mask(shape, segment.window, lag_blocks, low, q)
        parts.append(_attend_masked(q, k, v, masks[key], scale))
    return parts


def _attend_growing(q_BNQD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, lag_blocks: int | None, scale: float) -> Tensor:
    """One block without a window. Its mask, as long as the keys, is not kept for a backward pass but made again there."""

    def attend(q_BNQD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor) -> Tensor:
        shape = q_BNQD.shape[2], k_BKLD.shape[2], q_BNQD.shape[1] // k_BKLD.shape[1]
        return _attend_masked(q_BNQD, k_BKLD, v_BKLD, _mask(shape, None, lag_blocks, 0, q_BNQD), scale)

    if not torch.is_grad_enabled():
        return attend(q_BNQD, k_BKLD, v_BKLD)
    return checkpoint(attend, q_BNQD, k_BKLD, v_BKLD, use_reentrant=False, preserve_rng_state=False)


def _mask(
    shape: tuple[int, int, int], window: int | None, lag_blocks: int | None, low: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The additive mask [G * Q, L] of Q queries at the end of L keys, and which queries see nothing, [Q, 1].

    shape: (Q, L, G); low: keys of the segment before these L. Queries that see nothing are left unmasked: a row of -inf
    would make NaN in some kernels.
    """
    queries, keys, groups = shape
    hidden_QL = is_hidden(range(keys - queries, keys), range(keys), window, like.device)
    if lag_blocks is not None:
        newest_Q1 = torch.arange(keys - queries, keys, device=like.device)[:, None]
        own_block_Q1 = (newest_Q1 + 1 + low) // lag_blocks * lag_blocks - low
        hidden_QL |= torch.arange(keys, device=like.device) >= own_block_Q1
    blind_Q1 = hidden_QL.all(dim=-1, keepdim=True)
    return additive(hidden_QL & ~blind_Q1, like.dtype).repeat(groups, 1), blind_Q1


def _attend_masked(q_BNQD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, mask: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """One fused call. The groups of heads become further queries, since some kernels take either groups or a mask."""
    mask_QL, blind_Q1 = mask
    heads = k_BKLD.shape[1]
    q_BKQD = q_BNQD.unflatten(1, (heads, -1)).flatten(2, 3)
    seen_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKLD, v_BKLD, attn_mask=mask_QL, scale=scale)
    return seen_BKQD.unflatten(2, (-1, q_BNQD.shape[2])).flatten(1, 2).masked_fill(blind_Q1, 0.0)
