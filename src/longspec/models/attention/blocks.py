"""Attention of blocks of tokens that are drafted at once, over a text and themselves (DFlash, arXiv 2602.06036, section 4).

A block stands at its anchor, a token of the text. Its queries see the text's keys before the anchor, of the anchor's document,
and their own block's keys, and no other block. No mask is larger than a chunk of blocks by the keys that these see.

Shapes: B rows, A blocks of a row, W slots of a block, Q = A W queries, N query heads, K key/value heads, S keys of the text, D
head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspec.models.attention import flex, sdpa
from longspec.models.attention.backends import AUTO, FLASH, FLEX, SDPA, fastest
from longspec.models.attention.chains import KeysValues
from longspec.models.attention.visibility import Remembering, additive


@dataclass(frozen=True)
class BlockVisibility(Remembering):
    """Which keys the slots of each block see.

    anchors_BA: the text's token at which slot 0 stands; starts_BA: the first token of the anchor's document. Slot w stands w
    tokens behind the anchor. window None: the text before the anchor, and every slot of the block. Else slots see no later
    ones, and nothing more than `window` tokens back.
    """

    anchors_BA: Tensor
    starts_BA: Tensor
    slots: int
    window: int | None = None

    def text_bounds_BQ(self) -> tuple[Tensor, Tensor]:
        """Return the first and the last key of the text that each query sees; the last lies before the first for none."""
        return self.once("bounds", self._text_bounds)

    def _text_bounds(self) -> tuple[Tensor, Tensor]:
        first_BQ = self.starts_BA.repeat_interleave(self.slots, dim=1)
        anchor_BQ = self.anchors_BA.repeat_interleave(self.slots, dim=1)
        if self.window is not None:
            slot_Q = torch.arange(anchor_BQ.shape[1], device=anchor_BQ.device) % self.slots
            first_BQ = torch.maximum(first_BQ, anchor_BQ + slot_Q - self.window)
        return first_BQ, anchor_BQ - 1


@dataclass(frozen=True)
class Chunk:
    """Blocks [first, last) of one row, over the keys [low, high) of the text and their own."""

    row: int
    first: int
    last: int
    low: int
    high: int

    def queries(self, slots: int) -> tuple[int, slice, slice]:
        """Where their queries and their own keys lie, in [B, heads, Q]."""
        return self.row, slice(None), slice(self.first * slots, self.last * slots)

    @property
    def text(self) -> tuple[int, slice, slice]:
        """Where their keys of the text lie, in [B, K, S]."""
        return self.row, slice(None), slice(self.low, self.high)


def attend_blocks(
    q_BNQD: Tensor, text: KeysValues, own: KeysValues, visibility: BlockVisibility, scale: float, backend: str = AUTO
) -> Tensor:
    """Attention output [B, N, Q, D]: a softmax over text keys and the block's own together.

    text: rotated keys and values [B, K, S, D]; own: those of the blocks, [B, K, Q, D]. flash-attn has no kernel for blocks;
    flex_attention takes its place. Raises ValueError for flex with a gradient on a CPU.
    """
    if backend == AUTO:
        training = flex.needs_gradient(q_BNQD, *text, *own)
        backend = fastest(q_BNQD.device.type, q_BNQD.dtype, q_BNQD.shape[-1], training)
    return BLOCKS[backend](visibility, scale, q_BNQD, *text, *own)


def chunks_of(visibility: BlockVisibility) -> list[Chunk]:
    """Return the chunks of all rows, of about as many queries as a mask has rows; two transfers to the host."""
    size, found = max(1, sdpa.QUERY_BLOCK // visibility.slots), []
    starts_BA, window = visibility.starts_BA, visibility.window
    if window is not None:
        starts_BA = torch.maximum(starts_BA, visibility.anchors_BA - window)
    for row, (anchors, starts) in enumerate(zip(visibility.anchors_BA.tolist(), starts_BA.tolist(), strict=True)):
        for first in range(0, len(anchors), size):
            part = slice(first, first + size)
            low, high = min(starts[part]), max(anchors[part])
            found.append(Chunk(row, first, first + len(anchors[part]), min(low, high), high))
    return found


def _mask(chunk: Chunk, visibility: BlockVisibility, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [Q, L] of a chunk's queries over its text and its own keys; it is made anew in the backward."""
    slots = visibility.slots
    queries = slice(chunk.first * slots, chunk.last * slots)
    first_Q1, last_Q1 = (bound_BQ[chunk.row, queries, None] for bound_BQ in visibility.text_bounds_BQ())
    text_L = torch.arange(chunk.low, chunk.high, device=first_Q1.device)
    place_Q = torch.arange(queries.stop - queries.start, device=first_Q1.device)
    seen_QQ = place_Q[:, None] // slots == place_Q // slots
    if visibility.window is not None:
        seen_QQ &= place_Q <= place_Q[:, None]
    return additive(~torch.cat([(text_L >= first_Q1) & (text_L <= last_Q1), seen_QQ], dim=1), dtype)


class _InChunks(torch.autograd.Function):
    """Attend in chunks, each one call of a kernel, forward and backward; output and log-sum-exp are kept, and no mask."""

    @staticmethod
    def forward(ctx: Any, visibility: BlockVisibility, scale: float, *tensors: Tensor) -> Tensor:
        """Return the attention's output."""
        q_BNQD, *keys_values = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
        seen_BNQD = torch.empty_like(q_BNQD)
        lse_BNQ = q_BNQD.new_empty(q_BNQD.shape[:3], dtype=sdpa.accumulated_in(q_BNQD))
        for chunk in visibility.once("chunks", lambda: chunks_of(visibility)):
            place, keys, values = _of_chunk(chunk, visibility.slots, keys_values)
            q_KGQD = q_BNQD[place].unflatten(0, (len(keys), -1))
            seen, lse = sdpa.attend_part(q_KGQD, keys, values, _mask(chunk, visibility, q_BNQD.dtype), scale)
            seen_BNQD[place], lse_BNQ[place] = seen.flatten(0, 1), lse.flatten(0, 1)
        ctx.visibility, ctx.scale = visibility, scale
        ctx.save_for_backward(seen_BNQD, lse_BNQ, q_BNQD, *keys_values)
        return seen_BNQD

    @staticmethod
    def backward(ctx: Any, grad_BNQD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, the text's keys and values, and the blocks'."""
        seen_BNQD, lse_BNQ, q_BNQD, *keys_values = ctx.saved_tensors
        of_q_BNQD, *of_keys_values = (torch.zeros_like(x) for x in (q_BNQD, *keys_values))
        slots = ctx.visibility.slots
        for chunk in ctx.visibility.once("chunks", lambda: chunks_of(ctx.visibility)):
            place, keys, values = _of_chunk(chunk, slots, keys_values)
            heads = (len(keys), -1)
            of_queries = [x[place].unflatten(0, heads) for x in (grad_BNQD.contiguous(), q_BNQD, seen_BNQD, lse_BNQ)]
            mask_QL = _mask(chunk, ctx.visibility, q_BNQD.dtype)
            of_q, *of_both = sdpa.part_gradients(of_queries, keys, values, mask_QL, ctx.scale)
            of_q_BNQD[place] = of_q.flatten(0, 1)
            count = chunk.high - chunk.low
            for of_text, of_own, of_part in zip(of_keys_values[:2], of_keys_values[2:], of_both, strict=True):
                of_text[chunk.text] += of_part[:, :count]
                of_own[place] = of_part[:, count:]
        return None, None, of_q_BNQD, *of_keys_values


def _of_chunk(chunk: Chunk, slots: int, keys_values: list[Tensor]) -> tuple[tuple[int, slice, slice], Tensor, Tensor]:
    """Where a chunk's queries lie, and its keys and values [K, L, D], the text's first."""
    place, (k_text, v_text, k_own, v_own) = chunk.queries(slots), keys_values
    return place, torch.cat([k_text[chunk.text], k_own[place]], dim=1), torch.cat([v_text[chunk.text], v_own[place]], dim=1)


def _by_flex(visibility: BlockVisibility, scale: float, q_BNQD: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
    """One call of flex_attention, whose block mask is made of the bounds."""
    key = ("flex", k.shape[2])
    arguments = (*visibility.text_bounds_BQ(), visibility.slots, visibility.window is not None, k.shape[2])
    mask = visibility.once(key, partial(flex.draft_block_mask, *arguments))
    keys, values = torch.cat([k, own[0]], dim=2), torch.cat([v, own[1]], dim=2)
    return flex.attend_by(mask, q_BNQD, keys, values, scale)


BLOCKS: dict[str, Callable[..., Tensor]] = {SDPA: _InChunks.apply, FLEX: _by_flex, FLASH: _by_flex}
