"""Attention with sinks: a learned number for each query head joins the softmax as one more score, of a key without a value.

With L the log-sum-exp of the keys' scores and s the sink, every weight is multiplied by exp(L) / (exp(L) + exp(s)), which is
sigmoid(L - s) (GPT-OSS, arXiv 2508.10925). So any kernel that hands out L serves; where a backend has none, the scores are
made, for a block of queries and one key/value head at a time. A target alone has sinks: nothing here has a backward.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width, Q queries and L keys of a block.
"""

import torch
from torch import Tensor

from longspec.models.attention import flash, flex, sdpa
from longspec.models.attention.text_part import FUSED, KERNEL_DEVICE, Part, accumulated_in
from longspec.models.attention.tree_visibility import TreeVisibility
from longspec.models.attention.visibility import Segment, Visibility


def weaken(part: Part, sinks_N: Tensor) -> Tensor:
    """The output [B, N, S, D] of attention whose log-sum-exp is known, with the sinks in its softmax."""
    seen_BNSD, lse_BNS = part
    share_BNS = torch.sigmoid(lse_BNS - sinks_N.to(lse_BNS.dtype)[:, None])
    return (seen_BNSD * share_BNS[..., None]).to(seen_BNSD.dtype)


def attend_blocks(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Part:
    """Output and log-sum-exp, 0 and -inf for a query that sees no key, block after block of queries."""
    (rows, heads, length, _), width = q_BNSD.shape, v_BKTD.shape[-1]
    seen_BNSD = v_BKTD.new_zeros(rows, heads, length, width)
    lse_BNS = q_BNSD.new_full((rows, heads, length), -torch.inf, dtype=accumulated_in(q_BNSD))
    segments = visibility.segments(length, k_BKTD.shape[2])
    for row in range(rows):
        for segment in segments[row % len(segments)]:
            for start in range(segment.start, segment.stop, sdpa.QUERY_BLOCK):
                block = slice(start, min(start + sdpa.QUERY_BLOCK, segment.stop))
                keys, is_seen_QL = _keys_of(segment, block, q_BNSD.device)
                part = attend_masked(q_BNSD[row, :, block], k_BKTD[row, :, keys], v_BKTD[row, :, keys], is_seen_QL, scale)
                seen_BNSD[row, :, block], lse_BNS[row, :, block] = part
    return seen_BNSD, lse_BNS


def _keys_of(segment: Segment, block: slice, device: torch.device) -> tuple[slice, Tensor]:
    """The keys that a block of a segment's queries may see, and which of them each sees, [Q, L]."""
    high = segment.key_stop - (segment.stop - block.stop)
    first = high - (block.stop - block.start)  # the key at which the first query stands
    low = segment.key_start if segment.window is None else max(segment.key_start, first - segment.window)
    back_QL = torch.arange(first, high, device=device)[:, None] - torch.arange(low, high, device=device)
    is_seen_QL = back_QL >= 0 if segment.window is None else (back_QL >= 0) & (back_QL <= segment.window)
    return slice(low, high), is_seen_QL


def attend_masked(q_NQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, is_seen_QL: Tensor, scale: float) -> Part:
    """Output [N, Q, D] and log-sum-exp [N, Q] of one row; each of its queries sees a key."""
    q_KGQD = q_NQD.unflatten(0, (k_KLD.shape[0], -1))
    mask_QL = torch.zeros_like(is_seen_QL, dtype=q_NQD.dtype).masked_fill_(~is_seen_QL, -torch.inf)
    if q_NQD.device.type == KERNEL_DEVICE:
        keys, values = (x[:, None].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_KLD, v_KLD))
        seen_KGQD, lse_KGQ = FUSED(q_KGQD, keys, values, attn_mask=mask_QL[None, None], scale=scale)
        return seen_KGQD.flatten(0, 1), lse_KGQ.flatten(0, 1)
    parts = [_plain(*head, mask_QL, scale) for head in zip(q_KGQD, k_KLD, v_KLD, strict=True)]
    seen, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return seen, lse


def _plain(q_GQD: Tensor, k_LD: Tensor, v_LD: Tensor, mask_QL: Tensor, scale: float) -> Part:
    """The queries of one key/value head, by all their scores."""
    scores_GQL = (q_GQD @ k_LD.T).to(accumulated_in(q_GQD)) * scale + mask_QL
    lse_GQ = scores_GQL.logsumexp(-1)
    return (scores_GQL - lse_GQ[..., None]).exp_().to(v_LD.dtype) @ v_LD, lse_GQ


def attend_tree(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Part:
    """Output and log-sum-exp of a tree's nodes, each of which sees itself, over the prefix and each other, row by row."""
    prefix = k_BKTD.shape[2] - visibility.tree_BSL.shape[2]
    low = visibility.unseen(prefix)
    mask_BST = visibility.without(low).mask_BST(prefix - low)
    rows = zip(q_BNSD, k_BKTD[:, :, low:], v_BKTD[:, :, low:], mask_BST.expand(len(q_BNSD), -1, -1), strict=True)
    seen, lse = (torch.stack(part) for part in zip(*(attend_masked(*row, scale) for row in rows), strict=True))
    return seen, lse


# By the names of backends.py; flash-attn and flex_attention hand out the log-sum-exp of their kernels.
PARTS = {"flash_attention_2": flash.attend_text, "flex_attention": flex.attend_text, "sdpa": attend_blocks}
