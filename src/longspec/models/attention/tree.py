"""Attention of a draft tree's nodes over a cached prefix and over each other (LongSpec 3.3, hybrid tree attention).

The prefix, which all nodes see alike, goes through a fast kernel without a mask of queries by keys, the few keys of the tree
through a small mask. Each part weighs by the sum of its exponentials, of which both know the logarithm.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries (nodes), P prefix keys, L tree keys, T = P + L keys,
Q = G * S queries of one key/value head, D head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models.attention import flash
from longspec.models.attention.text_part import FUSED
from longspec.models.attention.visibility import TreeVisibility, additive

Part = tuple[Tensor, Tensor]  # output [B, K, Q, D] over some keys, and the log-sum-exp of their scores [B, K, Q]
Attend = Callable[[Tensor, Tensor], Part]
Backend = Callable[[Tensor, Tensor, Tensor, TreeVisibility, float], Tensor]


def attend(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float, backend: Backend
) -> Tensor:
    """Attention output [B, N, S, D]; zeros for a query that sees no key.

    Where a window hides prefix keys from some nodes, all backends take one mask, as wide as the window and the tree.
    """
    if k_BKTD.shape[2] == 0:
        return torch.zeros_like(q_BNSD)
    prefix = k_BKTD.shape[2] - visibility.tree_BSL.shape[2]
    q_BKQD = q_BNSD.unflatten(1, (k_BKTD.shape[1], -1)).flatten(2, 3)  # groups of heads as further queries: no key is repeated
    if visibility.has_plain_prefix(prefix):
        seen_BKQD = backend(q_BKQD, k_BKTD, v_BKTD, visibility, scale)
    else:
        low = visibility.unseen(prefix)
        seen_BKQD = attend_masked(q_BKQD, k_BKTD[:, :, low:], v_BKTD[:, :, low:], visibility.without(low), scale)
    return seen_BKQD.unflatten(2, (-1, q_BNSD.shape[2])).flatten(1, 2)


def attend_masked(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Tensor:
    """One call with a mask over all keys, [B, K, Q, D]: the way of windows."""
    prefix = k_BKTD.shape[2] - visibility.tree_BSL.shape[2]
    groups = q_BKQD.shape[2] // visibility.query_depths_S.shape[0]

    def masks() -> tuple[Tensor, Tensor]:
        mask_B1QT = visibility.mask_BST(prefix).repeat(1, groups, 1)[:, None]
        blind_B1Q1 = ~mask_B1QT.any(dim=-1, keepdim=True)
        return mask_B1QT | blind_B1Q1, blind_B1Q1  # a row without a key would make NaN in some kernels

    mask_B1QT, blind_B1Q1 = visibility.once(("queries", prefix, groups), masks)
    seen_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKTD, v_BKTD, attn_mask=mask_B1QT, scale=scale)
    return seen_BKQD.masked_fill(blind_B1Q1, 0.0)


def attend_fused(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Tensor:
    """Attention [B, K, Q, D] in two parts by torch's CPU kernel; its kernels for GPUs take no such masks with a log-sum-exp."""
    if q_BKQD.device.type != "cpu":
        return attend_masked(q_BKQD, k_BKTD, v_BKTD, visibility, scale)

    def attend_prefix(k_BKPD: Tensor, v_BKPD: Tensor) -> Part:
        return FUSED(q_BKQD, k_BKPD, v_BKPD, attn_mask=_padding(visibility, q_BKQD, k_BKPD.shape[2]), scale=scale)

    def attend_tree(k_BKLD: Tensor, v_BKLD: Tensor) -> Part:
        return FUSED(q_BKQD, k_BKLD, v_BKLD, attn_mask=_tree_mask(visibility, q_BKQD), scale=scale)

    return _attend_in_parts(attend_prefix, attend_tree, k_BKTD, v_BKTD, visibility)


def attend_flash(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Tensor:
    """Attention in two parts, [B, K, Q, D]: over the prefix by flash-attn's kernel for caches, which reads each row's length on
    the device and takes no masks, and over the few keys of the tree by all scores, in float32.
    """
    lengths_B = visibility.once("int32", lambda: visibility.lengths_B.to(torch.int32))

    def attend_prefix(k_BKPD: Tensor, v_BKPD: Tensor) -> Part:
        return flash.attend_cached(q_BKQD, k_BKPD, v_BKPD, lengths_B, scale)

    def attend_tree(k_BKLD: Tensor, v_BKLD: Tensor) -> Part:
        wide_BKQD = q_BKQD.float()
        scores_BKQL = (wide_BKQD * scale) @ k_BKLD.float().transpose(2, 3) + _tree_mask(visibility, wide_BKQD)
        return scores_BKQL.softmax(-1) @ v_BKLD.float(), scores_BKQL.logsumexp(-1)

    return _attend_in_parts(attend_prefix, attend_tree, k_BKTD, v_BKTD, visibility)


def _attend_in_parts(
    attend_prefix: Attend, attend_tree: Attend, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility
) -> Tensor:
    """Prefix and tree merged, [B, K, Q, D]."""
    tree = visibility.tree_BSL.shape[2]
    prefix = k_BKTD.shape[2] - tree
    if tree and not any(visibility.lengths):
        return attend_tree(k_BKTD[:, :, prefix:], v_BKTD[:, :, prefix:])[0].to(v_BKTD.dtype)
    seen_BKQD, log_sum_BKQ = attend_prefix(k_BKTD[:, :, :prefix], v_BKTD[:, :, :prefix])
    if 0 in visibility.lengths:  # of an empty prefix kernels say what they like
        empty_B111 = (visibility.lengths_B == 0)[:, None, None, None]
        seen_BKQD = seen_BKQD.masked_fill(empty_B111, 0.0)
        log_sum_BKQ = log_sum_BKQ.masked_fill(empty_B111[..., 0], -torch.inf)
    if not tree:
        return seen_BKQD
    tree_BKQD, tree_log_sum_BKQ = attend_tree(k_BKTD[:, :, prefix:], v_BKTD[:, :, prefix:])
    # Every node sees itself, so the tree's part is never empty: a / (a + b) = sigmoid(log a - log b).
    of_tree_BKQ1 = torch.sigmoid(tree_log_sum_BKQ - log_sum_BKQ)[..., None]
    wide = of_tree_BKQ1.dtype
    return torch.lerp(seen_BKQD.to(wide), tree_BKQD.to(wide), of_tree_BKQ1).to(v_BKTD.dtype)


def _tree_mask(visibility: TreeVisibility, q_BKQD: Tensor) -> Tensor:
    """Additive mask [B, 1, Q, L] that hides from each node the nodes that are not on its path."""
    groups = q_BKQD.shape[2] // visibility.tree_BSL.shape[1]
    return visibility.once(("tree", groups), lambda: additive(~visibility.tree_BSL.repeat(1, groups, 1)[:, None], q_BKQD.dtype))


def _padding(visibility: TreeVisibility, q_BKQD: Tensor, prefix: int) -> Tensor | None:
    """Additive mask [B, 1, 1, P] that hides the places behind shorter rows from all queries; None where no row is shorter."""
    if all(length == prefix for length in visibility.lengths):
        return None

    def make() -> Tensor:
        behind_BP = torch.arange(prefix, device=q_BKQD.device) >= visibility.lengths_B[:, None]
        return additive(behind_BP[:, None, None], q_BKQD.dtype)

    return visibility.once(("padding", prefix), make)
