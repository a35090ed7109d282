"""Attend for blocks of tokens drafted at once, over a text and themselves (DFlash, arXiv 2602.06036, section 4).

A block stands at its anchor, a token of the text. Its queries see the text's keys before the anchor, in the anchor's document,
and their own block's keys, but no other block's. No mask is larger than a chunk of blocks by the keys that the chunk sees.

Shapes: B rows, A blocks of a row, W slots of a block, Q = A W queries, N query heads, K key/value heads, S keys of the text, D
head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspec.models.attention import flex, sdpa
from longspec.models.attention.backends import FLASH, FLEX, SDPA
from longspec.models.attention.chains import by_kernels
from longspec.models.attention.sdpa import Call
from longspec.models.attention.visibility import Remembering


@dataclass(frozen=True)
class BlockVisibility(Remembering):
    """Say which keys the slots of each block see.

    anchors_BA: the text's token at which slot 0 stands; starts_BA: the first token of the anchor's document. Slot w has the
    position of the anchor plus w. window None: slots see the text before the anchor and the whole block. Otherwise they see no
    later slots, and at most `window` positions back.
    """

    anchors_BA: Tensor
    starts_BA: Tensor
    slots: int

    def text_bounds_BQ(self) -> tuple[Tensor, Tensor]:
        """Return the first and the last key of the text that each query sees; if it sees none, last is below first."""
        return self.once("bounds", self._text_bounds)

    def _text_bounds(self) -> tuple[Tensor, Tensor]:
        first_BQ = self.starts_BA.repeat_interleave(self.slots, dim=1)
        anchor_BQ = self.anchors_BA.repeat_interleave(self.slots, dim=1)
        if self.window is not None:
            slot_Q = torch.arange(anchor_BQ.shape[1], device=anchor_BQ.device) % self.slots
            first_BQ = torch.maximum(first_BQ, anchor_BQ + slot_Q - self.window)
        return first_BQ, anchor_BQ - 1


def chunks_of(q_BNQD: Tensor, k_BKTD: Tensor, visibility: BlockVisibility) -> list[Call]:
    """Return the calls of all rows, with about QUERY_BLOCK queries each; two transfers to the host."""
    return visibility.once("chunks", lambda: list(_chunks(visibility, k_BKTD.shape[2] - q_BNQD.shape[2])))


def _chunks(visibility: BlockVisibility, text: int) -> Iterator[Call]:
    slots, window, starts_BA = visibility.slots, visibility.window, visibility.starts_BA
    size, device = max(1, sdpa.QUERY_BLOCK // slots), starts_BA.device
    if window is not None:
        starts_BA = torch.maximum(starts_BA, visibility.anchors_BA - window)
    for row, (anchors, starts) in enumerate(zip(visibility.anchors_BA.tolist(), starts_BA.tolist(), strict=True)):
        for first in range(0, len(anchors), size):
            part = slice(first, first + size)
            low, high = min(starts[part]), max(anchors[part])
            queries = slice(first * slots, (first + len(anchors[part])) * slots)
            text_L = torch.arange(min(low, high), high, device=device)
            own_Q = torch.arange(queries.start, queries.stop, device=device)
            hides = partial(_hidden, visibility, row, own_Q, text_L)
            yield Call(row, queries, torch.cat([text_L, text + own_Q]), hides)


def _hidden(visibility: BlockVisibility, row: int, query_Q: Tensor, text_L: Tensor) -> Tensor:
    """Return which of the text's and of their own keys the queries of a chunk do not see, [Q, L + Q]."""
    first_Q1, last_Q1 = (bound_BQ[row, query_Q, None] for bound_BQ in visibility.text_bounds_BQ())
    seen_QQ = query_Q[:, None] // visibility.slots == query_Q // visibility.slots
    if visibility.window is not None:
        seen_QQ &= query_Q <= query_Q[:, None]
    return ~torch.cat([(text_L >= first_Q1) & (text_L <= last_Q1), seen_QQ], dim=1)


IN_CHUNKS = partial(sdpa.attend_text, calls=chunks_of), partial(sdpa.text_gradients, calls=chunks_of)


def _whole(own: tuple[Tensor, ...], *text: Tensor) -> Iterator[Tensor]:
    """Return keys and values of the text, followed by the blocks'."""
    return (torch.cat(both, dim=2) for both in zip(text, own, strict=True))


def by_sdpa(visibility: BlockVisibility, scale: float, q_BNQD: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
    """Attend in chunks, each one call of a kernel; [B, N, Q, D]."""
    return by_kernels(IN_CHUNKS, visibility, scale, q_BNQD, *_whole(own, k, v))


def by_flex(visibility: BlockVisibility, scale: float, q_BNQD: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
    """Attend in one call of flex_attention, with a block mask made from the bounds; [B, N, Q, D]."""
    keys, values = _whole(own, k, v)
    arguments = (*visibility.text_bounds_BQ(), keys.shape[2], visibility.slots, visibility.window is not None)
    mask = visibility.once(("flex", keys.shape[2]), partial(flex.block_mask, *arguments))
    return flex.attend(mask, q_BNQD, keys, values, scale, with_lse=False)[0]


# flash-attn has no kernel for blocks.
WAYS: dict[str, Callable[..., Tensor]] = {FLASH: by_flex, FLEX: by_flex, SDPA: by_sdpa}
