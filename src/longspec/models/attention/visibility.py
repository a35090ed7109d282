"""Say which keys a query sees: in a text by causality, a window, a lag and documents; in a draft tree the path to a node.

Every backend derives its own form of mask from here.

Shapes: B rows, S queries, T keys; T >= S, and the last query stands at the last key. Indices count keys from 0, so
query s has the index T - S + s. Of a tree: S nodes, P prefix keys, L tree keys, T = P + L keys.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

PADDING = -1  # document id of padding, which sees nothing


@dataclass(frozen=True)
class Segment:
    """Hold queries [start, stop) (among the S) and the keys [key_start, key_stop) that they may see; both ends are aligned.

    The last query sees up to the last key, and each query before it one key less, back to `window` keys before its newest.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    window: int | None

    @property
    def is_windowed(self) -> bool:
        """Tell whether the window hides any of the segment's keys."""
        return self.window is not None and self.window < self.key_stop - self.key_start - 1


@dataclass(frozen=True)
class Remembering:
    """Keep the masks that backends make from it: those of one forward serve all its layers."""

    window: int | None = field(default=None, kw_only=True)
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, cached by key after the first call."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def windowed(self, window: int | None) -> Self:
        """Return a copy with another window."""
        return self if window == self.window else self.once(("window", window), lambda: replace(self, window=window))

    def to(self, device: torch.device | str | int) -> Self:
        """Return a copy on a device. accelerate's hooks call it by this name before each layer of a spread target."""
        held: dict[Any, Any] = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return self.once(("to", device), lambda: replace(self, **{name: x.to(device) for name, x in held.items()}))


@dataclass(frozen=True)
class Visibility(Remembering):
    """Say which keys a query of a text sees: query i sees key j if j <= i - lag, i - j <= window, and both are in one document.

    `lag_B` (int64, 0 or more) hides the newest keys, as the target's cache does while drafting. `lag_blocks` = n instead
    shows keys up to the last whole block of n before the query's own block, counted from the document's start. Documents are
    runs of one id; positions never define them, since they may jump inside a document too.
    """

    lag_B: Tensor | None = None
    lag_blocks: int | None = None
    document_ids_BT: Tensor | None = None  # PADDING marks padding

    def first(self, keys: int) -> "Visibility":
        """Return a copy for a row's first `keys` tokens alone."""
        if self.document_ids_BT is None or self.document_ids_BT.shape[1] == keys:
            return self
        ids_BT = self.document_ids_BT[:, :keys]
        return self.once(("first", keys), lambda: replace(self, document_ids_BT=ids_BT))

    def bounds_BS(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first and the last key each query sees, int64 [B or 1, S]; if it sees none, last is below first."""
        i_S = torch.arange(keys - queries, keys, device=device)
        start_BS = torch.zeros(1, 1, dtype=torch.int64, device=device)
        if self.document_ids_BT is not None:
            assert self.document_ids_BT.shape[1] == keys, "every key needs its document's id"
            start_BS = document_starts(self.document_ids_BT)[:, keys - queries :]
        last_BS = i_S[None]
        if self.lag_blocks is not None:
            last_BS = start_BS + (i_S - start_BS) // self.lag_blocks * self.lag_blocks - 1
        elif self.lag_B is not None:
            last_BS = i_S - self.lag_B[:, None]
        if self.document_ids_BT is not None:
            last_BS = last_BS.masked_fill(self.document_ids_BT[:, keys - queries :] == PADDING, -1)
        first_BS = start_BS if self.window is None else torch.maximum(start_BS, i_S - self.window)
        first_BS, last_BS = torch.broadcast_tensors(first_BS, last_BS)
        return first_BS.contiguous(), last_BS.contiguous()

    def segments(self, queries: int, keys: int) -> list[list[Segment]]:
        """Return the segments of each row, in order, or of one row if all are alike; queries outside them see nothing.

        With `lag_blocks` a segment's queries see fewer keys than its alignment says: those of their own block are hidden too.
        """
        return self.once(("segments", queries, keys), lambda: self._segments(queries, keys))

    def _segments(self, queries: int, keys: int) -> list[list[Segment]]:
        documents = [[(0, keys)]] if self.document_ids_BT is None else document_spans(self.document_ids_BT)
        lags = [0] if self.lag_B is None else self.lag_B.tolist()
        if self.lag_blocks is not None:
            lags = [1]
        rows = max(len(documents), len(lags))
        return [
            [
                segment
                for span in documents[row % len(documents)]
                if (segment := self._segment(span, lags[row % len(lags)], keys - queries)) is not None
            ]
            for row in range(rows)
        ]

    def _segment(self, span: tuple[int, int], lag: int, before: int) -> Segment | None:
        """Return the segment of one document; the first `before` tokens of the row are keys, but no queries."""
        start, stop = span
        first = max(before, start + (self.lag_blocks or lag))
        window = None if self.window is None else self.window - lag
        if first >= stop or (window is not None and window < 0):
            return None
        return Segment(first - before, stop - before, start, stop - lag, window)


def is_hidden(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query does not see, [Q, L], by causality and a window; both are places in one document."""
    query_Q1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key_L = torch.arange(keys.start, keys.stop, device=device)
    hidden_QL = key_L > query_Q1
    return hidden_QL if window is None else hidden_QL | (key_L < query_Q1 - window)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores: -inf where a key is hidden."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def dense(x: Tensor) -> Tensor:
    """Return x with contiguous vectors, as kernels need them; gradients may be one repeated number."""
    return x if x.stride(-1) == 1 else x.contiguous()


def nothing_seen(q_BNSD: Tensor, *keys_and_values: Tensor) -> Tensor:
    """Return the attention output if no query sees a key: zeros that depend on all inputs.

    So every parameter gets a gradient of zeros, which engines that reduce gradients wait for.
    """
    corners = sum((x[:1, :1, :1, :1] * 0.0).sum() for x in keys_and_values)
    return q_BNSD * 0.0 + corners


def document_starts(document_ids_BT: Tensor) -> Tensor:
    """Return the index at which each token's document starts, int64 [B, T]."""
    index_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    is_start = torch.ones_like(document_ids_BT, dtype=torch.bool)
    is_start[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return torch.where(is_start, index_T, 0).cummax(dim=1).values


def document_spans(document_ids_BT: Tensor) -> list[list[tuple[int, int]]]:
    """Return (start, stop) of each row's documents, without padding."""
    rows = []
    for ids_T in document_ids_BT:
        ids, counts = torch.unique_consecutive(ids_T, return_counts=True)
        stops = counts.cumsum(0)
        spans = zip(ids.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True)
        rows.append([(start, stop) for number, start, stop in spans if number != PADDING])
    return rows


@dataclass(frozen=True)
class TreeVisibility(Remembering):
    """Say which keys each node of a tree sees (LongSpec 3.3): its row's prefix and the tree keys that `tree_BSL` marks.

    The keys are P of the prefix, then L of the tree. Prefix key t of row b has position first_B[b] + t and is valid if that is
    within 0 .. lengths[b] - 1. Query s has position lengths[b] + query_depths_S[s], tree key l lengths[b] + key_depths_L[l].
    Keys more than `window` positions back are hidden. `lengths` and `lengths_B` hold the same numbers, so that neither host nor
    device waits for them; first_B None: 0.
    """

    lengths: tuple[int, ...]
    lengths_B: Tensor
    tree_BSL: Tensor
    query_depths_S: Tensor
    key_depths_L: Tensor
    first_B: Tensor | None = None

    def unseen(self, prefix: int) -> int:
        """Return how many of the first prefix keys lie before every row's window."""
        if self.window is None or self.first_B is not None:
            return 0
        return min(prefix, max(0, min(self.lengths) - self.window))

    def without(self, first: int) -> "TreeVisibility":
        """Return a copy for keys without the first ones."""
        if first == 0:
            return self
        return self.once(("without", first), lambda: replace(self, first_B=torch.full_like(self.lengths_B, first)))

    def mask_BST(self, prefix: int) -> Tensor:
        """Return which of the P + L keys each query sees, bool."""
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


def causal_pairs(length: int, window: int | None = None, lag: int = 0) -> int:
    """Count pairs in a document of `length` tokens where query i sees key j: j <= i - lag and i - j <= window."""
    if window is not None:
        return causal_pairs(length, None, lag) - causal_pairs(length, None, max(window + 1, lag))
    rest = max(0, length - lag)
    return rest * (rest + 1) // 2


def block_pairs(length: int, block: int) -> int:
    """Count pairs in a document where query i sees the keys before its own block: (i // block) * block of them."""
    whole, rest = divmod(length, block)
    return block * block * (whole * (whole - 1) // 2) + rest * whole * block
