"""Attention of a draft tree's nodes over a cached prefix and over each other.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries (nodes), P prefix keys, L tree keys, T = P + L keys,
Q = G * S queries of one key/value head, D head width.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TreeVisibility:
    """Which keys each node sees (LongSpec 3.3): its row's prefix and, of the tree, what `tree_BSL` marks.

    The keys are P of the prefix and then L of the tree. Prefix key t of row b stands at position first_B[b] + t and is there
    when that is within 0 .. lengths[b] - 1; query s stands at lengths[b] + query_depths_S[s], tree key l at lengths[b] +
    key_depths_L[l]. Nothing more than `window` positions back is seen. `lengths` and `lengths_B` hold the same numbers, so
    that neither the host nor the device waits for them; first_B None: 0.
    """

    lengths: tuple[int, ...]
    lengths_B: Tensor
    tree_BSL: Tensor
    query_depths_S: Tensor
    key_depths_L: Tensor
    first_B: Tensor | None = None
    window: int | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made at the first call with this key: one mask serves all layers of a forward."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def windowed(self, window: int) -> "TreeVisibility":
        """The same with another window."""
        return self.once(("window", window), lambda: replace(self, window=window))

    def is_whole(self, prefix: int) -> bool:
        """Whether every query sees all `prefix` keys, so that the prefix needs no mask."""
        if self.first_B is not None or any(length != prefix for length in self.lengths):
            return False
        return self.window is None or prefix + self.key_depths_L.shape[0] <= self.window

    def mask_BST(self, prefix: int) -> Tensor:
        """What each query sees of the P + L keys, bool."""
        return self.once(("mask", prefix), lambda: self._mask(prefix))

    def _mask(self, prefix: int) -> Tensor:
        position_BP = torch.arange(prefix, device=self.lengths_B.device)[None]
        if self.first_B is not None:
            position_BP = position_BP + self.first_B[:, None]
        there_BP = (position_BP >= 0) & (position_BP < self.lengths_B[:, None])
        back_BSP = self.lengths_B[:, None, None] + self.query_depths_S[:, None] - position_BP[:, None]
        back_SL = self.query_depths_S[:, None] - self.key_depths_L
        prefix_BSP, tree_BSL = there_BP[:, None].expand_as(back_BSP), self.tree_BSL
        if self.window is not None:
            prefix_BSP = prefix_BSP & (back_BSP <= self.window)
            tree_BSL = tree_BSL & (back_SL <= self.window)
        return torch.cat([prefix_BSP, tree_BSL], dim=-1)


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Tensor:
    """Attention output [B, N, S, D]; zeros for a query that sees no key."""
    if k_BKTD.shape[2] == 0:
        return torch.zeros_like(q_BNSD)
    tree = visibility.tree_BSL.shape[2]
    q_BKQD = q_BNSD.unflatten(1, (k_BKTD.shape[1], -1)).flatten(2, 3)
    if tree == 0 and visibility.is_whole(k_BKTD.shape[2]):
        seen_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKTD, v_BKTD, scale=scale)
    else:
        seen_BKQD = _attend_masked(q_BKQD, k_BKTD, v_BKTD, visibility, scale)
    return seen_BKQD.unflatten(2, (-1, q_BNSD.shape[2])).flatten(1, 2)


def _attend_masked(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Tensor:
    """One call with a mask over all keys. The groups of heads are further queries, so no key is repeated."""
    prefix = k_BKTD.shape[2] - visibility.tree_BSL.shape[2]
    groups = q_BKQD.shape[2] // visibility.query_depths_S.shape[0]

    def masks() -> tuple[Tensor, Tensor]:
        mask_B1QT = visibility.mask_BST(prefix).repeat(1, groups, 1)[:, None]
        blind_B1Q1 = ~mask_B1QT.any(dim=-1, keepdim=True)
        return mask_B1QT | blind_B1Q1, blind_B1Q1  # a row without a key would make NaN in some kernels

    mask_B1QT, blind_B1Q1 = visibility.once(("queries", prefix, groups), masks)
    seen_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKTD, v_BKTD, attn_mask=mask_B1QT, scale=scale)
    return seen_BKQD.masked_fill(blind_B1Q1, 0.0)
