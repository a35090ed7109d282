"""Which keys the nodes of a draft tree see: a cached prefix, and of the tree the path down to each.

Shapes: B rows, S queries (nodes), P prefix keys, L tree keys, T = P + L keys.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspec.models.attention.visibility import Remembering


@dataclass(frozen=True)
class TreeVisibility(Remembering):
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

    def windowed(self, window: int) -> "TreeVisibility":
        """A copy of this visibility with another window."""
        return self.once(("window", window), lambda: replace(self, window=window))

    def has_plain_prefix(self, prefix: int) -> bool:
        """Whether every query sees its row's first lengths[b] keys, so that the prefix needs no mask."""
        deepest = self.key_depths_L.shape[0]
        return self.first_B is None and (self.window is None or prefix + deepest <= self.window)

    def unseen(self, prefix: int) -> int:
        """How many of the first prefix keys lie before every row's window."""
        if self.window is None or self.first_B is not None:
            return 0
        return min(prefix, max(0, min(self.lengths) - self.window))

    def without(self, first: int) -> "TreeVisibility":
        """A copy of this visibility for keys without the first ones."""
        if first == 0:
            return self
        return self.once(("without", first), lambda: replace(self, first_B=torch.full_like(self.lengths_B, first)))

    def mask_BST(self, prefix: int) -> Tensor:
        """Mask, bool: which of the P + L keys each query sees."""
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
