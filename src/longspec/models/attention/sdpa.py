"""Attend with torch's own kernels: whole, or as one part of a larger softmax, with the log-sum-exp of the part's scores.

Whole attention is fused causal calls if a segment allows it, otherwise blocks of queries. A part belongs to a softmax with
further keys (chains.py) or a sink. For further keys: a kernel's backward recomputes its weights, exp(score - log-sum-exp), and
needs the output for one sum alone. With output and log-sum-exp over all keys it therefore returns its own keys' share of the
gradients, without the other keys' weights (FlashAttention-2, arXiv 2307.08691, section 3.1.2). A sink is a learned number for
each query head: one more score in the softmax, of a key without a value. With L the log-sum-exp of the keys' scores and s the
sink, every weight is multiplied by exp(L) / (exp(L) + exp(s)) = sigmoid(L - s) (GPT-OSS, arXiv 2508.10925). Only targets have
sinks, so these have no backward.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width, Q queries and L keys of one call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.models.attention.visibility import Segment, Visibility, additive, is_hidden, nothing_seen

# Number of queries in one call that needs a mask: the largest mask is [block, keys].
QUERY_BLOCK = 256
# The kernels that torch's own function calls on a CPU; only direct calls return and accept a log-sum-exp.
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNEL_DEVICE = "cpu"  # on other devices a part computes its scores, for one block of queries at a time
Part = tuple[Tensor, Tensor]  # output [B, N, S, D] and log-sum-exp [B, N, S]; 0 and -inf for queries that see no key
Gradients = tuple[Tensor, Tensor, Tensor]


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """Return the attention output [B, N, S, D]. Rows with the same segments share their calls."""
    segments = visibility.segments(q_BNSD.shape[2], k_BKTD.shape[2])
    if not any(segments):
        return nothing_seen(q_BNSD, k_BKTD, v_BKTD)
    rows_of: dict[tuple[Segment, ...], list[int]] = {}
    for row, segments_of_row in enumerate(segments):
        rows_of.setdefault(tuple(segments_of_row), []).append(row)
    if len(rows_of) == 1:
        return _attend_alike(q_BNSD, k_BKTD, v_BKTD, segments[0], visibility, scale)
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
    """Return the attention output [B, N, S, D] of rows that all have these segments."""
    parts, done = [], 0
    nothing_BNSD = v_BKTD.new_zeros(1, 1, 1, 1).expand(*q_BNSD.shape[:3], v_BKTD.shape[-1])
    for segment in segments:
        parts.append(nothing_BNSD[:, :, done : segment.start])
        q = q_BNSD[:, :, segment.start : segment.stop]
        k, v = (x[:, :, segment.key_start : segment.key_stop] for x in (k_BKTD, v_BKTD))
        plain = visibility.lag_blocks is None and not segment.is_windowed
        if plain and q.shape[2] in (1, k.shape[2]):
            parts.append(_attend_causal(q, k, v, scale))
        else:
            parts += _attend_in_blocks(q, k, v, segment.window, visibility, scale)
        done = segment.stop
    parts.append(nothing_BNSD[:, :, done:])
    parts = [part for part in parts if part.shape[2]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_causal(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    """Return the output of one fused call without a mask; there is one query, or as many queries as keys."""
    groups = q_BNSD.shape[1] // k_BKTD.shape[1]
    if groups > 1 and q_BNSD.device.type == "cuda" and q_BNSD.dtype not in (torch.bfloat16, torch.float16):
        # On a GPU only half precision's kernel takes groups; for other dtypes torch would store the scores of all pairs.
        k_BKTD, v_BKTD, groups = k_BKTD.repeat_interleave(groups, 1), v_BKTD.repeat_interleave(groups, 1), 1
    causal = q_BNSD.shape[2] > 1
    return F.scaled_dot_product_attention(q_BNSD, k_BKTD, v_BKTD, is_causal=causal, scale=scale, enable_gqa=groups > 1)


def _attend_in_blocks(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None, visibility: Visibility, scale: float
) -> list[Tensor]:
    """Attend in one segment, block by block of queries, each with only the keys that causality and window allow."""
    num_queries, num_keys, lag_blocks = q_BNSD.shape[2], k_BKTD.shape[2], visibility.lag_blocks
    groups, parts = q_BNSD.shape[1] // k_BKTD.shape[1], []
    for start in range(0, num_queries, QUERY_BLOCK):
        q = q_BNSD[:, :, start : start + QUERY_BLOCK]
        high = num_keys - num_queries + start + q.shape[2]
        low = 0 if window is None else max(0, high - q.shape[2] - window)
        k, v = k_BKTD[:, :, low:high], v_BKTD[:, :, low:high]
        if window is None:
            parts.append(_attend_growing(q, k, v, lag_blocks, scale))
            continue
        # Blocks inside a document share one mask, which autograd then keeps once.
        shape, before = (q.shape[2], high - low, groups), low if lag_blocks else 0
        key = ("sdpa", shape, window, before, q.dtype)
        mask = visibility.once(key, partial(_block_mask, shape, window, lag_blocks, low, q))
        parts.append(_attend_masked(q, k, v, mask, scale))
    return parts


def _attend_growing(q_BNQD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, lag_blocks: int | None, scale: float) -> Tensor:
    """Attend one block without a window. Its mask, as long as the keys, is made again in the backward instead of kept."""

    def attend(q_BNQD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor) -> Tensor:
        shape = q_BNQD.shape[2], k_BKLD.shape[2], q_BNQD.shape[1] // k_BKLD.shape[1]
        return _attend_masked(q_BNQD, k_BKLD, v_BKLD, _block_mask(shape, None, lag_blocks, 0, q_BNQD), scale)

    if not torch.is_grad_enabled():
        return attend(q_BNQD, k_BKLD, v_BKLD)
    return checkpoint(attend, q_BNQD, k_BKLD, v_BKLD, use_reentrant=False, preserve_rng_state=False)


def _block_mask(
    shape: tuple[int, int, int], window: int | None, lag_blocks: int | None, low: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the additive mask [G * Q, L] of Q queries at the end of L keys, and which queries see nothing, [Q, 1].

    shape: (Q, L, G); low: number of the segment's keys before these L. Queries that see nothing are left unmasked: a row of
    -inf would make NaN in some kernels.
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
    """Return one fused call's output. Groups of heads become further queries: some kernels take either groups or a mask."""
    mask_QL, blind_Q1 = mask
    q_BKQD = q_BNQD.unflatten(1, (k_BKLD.shape[1], -1)).flatten(2, 3)
    seen_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKLD, v_BKLD, attn_mask=mask_QL, scale=scale)
    return seen_BKQD.unflatten(2, (-1, q_BNQD.shape[2])).flatten(1, 2).masked_fill(blind_Q1, 0.0)


@dataclass(frozen=True)
class Call:
    """Hold queries of one row, and keys of which they see some."""

    row: int
    queries: slice  # a span of S
    keys: slice | Tensor  # in T: a span, or indices
    hides: Callable[[], Tensor] | None  # returns which of the keys a query does not see, [Q, L]; None: the kernel's causality


Calls = Callable[[Tensor, Tensor, Any], list[Call]]  # (queries, keys, visibility) -> calls


def text_calls(q_BNSD: Tensor, k_BKTD: Tensor, visibility: Visibility) -> list[Call]:
    """Return the calls of a text, in order. If a kernel is causal itself, a document that no window cuts is one call."""
    assert visibility.lag_B is None, "a text sees itself without a lag"
    assert visibility.lag_blocks is None, "a text sees itself without a lag"
    (rows, _, queries, _), keys, has_kernel = q_BNSD.shape, k_BKTD.shape[2], q_BNSD.device.type == KERNEL_DEVICE
    segments = visibility.segments(queries, keys)
    return visibility.once(
        ("text calls", rows, queries, keys, has_kernel),
        lambda: [
            call
            for row in range(rows)
            for segment in segments[row % len(segments)]
            for call in _calls_of(row, segment, has_kernel, q_BNSD.device)
        ],
    )


def _calls_of(row: int, segment: Segment, has_kernel: bool, device: torch.device) -> Iterator[Call]:
    if has_kernel and not segment.is_windowed and segment.stop - segment.start == segment.key_stop - segment.key_start:
        yield Call(row, slice(segment.start, segment.stop), slice(segment.key_start, segment.key_stop), None)
        return
    for start in range(segment.start, segment.stop, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, segment.stop)
        queries, high = stop - start, segment.key_stop - (segment.stop - stop)
        low = segment.key_start if segment.window is None else max(segment.key_start, high - queries - segment.window)
        keys = high - low
        hides = partial(is_hidden, range(keys - queries, keys), range(keys), segment.window, device)
        yield Call(row, slice(start, stop), slice(low, high), hides)


def attend_text(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Any, scale: float, calls: Calls = text_calls
) -> Part:
    """Return output and log-sum-exp of a text, or its last S tokens, over the whole text. calls: makes other calls."""
    (rows, heads, length, _), width = q_BNSD.shape, v_BKTD.shape[-1]
    seen_BNSD = v_BKTD.new_zeros(rows, length, heads, width).transpose(1, 2)
    lse_BNS = q_BNSD.new_full((rows, heads, length), -torch.inf, dtype=accumulated_in(q_BNSD))
    for call in calls(q_BNSD, k_BKTD, visibility):
        q_KGQD = q_BNSD[call.row, :, call.queries].unflatten(0, (k_BKTD.shape[1], -1))
        keys, values = (x[call.row][:, call.keys] for x in (k_BKTD, v_BKTD))
        seen_KGQD, lse_KGQ = attend_part(q_KGQD, keys, values, _mask(call, q_BNSD.dtype), scale)
        seen_BNSD[call.row, :, call.queries] = seen_KGQD.flatten(0, 1)
        lse_BNS[call.row, :, call.queries] = lse_KGQ.flatten(0, 1)
    return seen_BNSD, lse_BNS


def text_gradients(
    grad_BNSD: Tensor,
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    whole: Part,
    visibility: Any,
    scale: float,
    calls: Calls = text_calls,
) -> Gradients:
    """Return the text's gradients of queries, keys, values. whole: output and log-sum-exp over all keys, also other parts'."""
    of_q_BNSD, of_k_BKTD, of_v_BKTD = (torch.zeros_like(x) for x in (q_BNSD, k_BKTD, v_BKTD))
    for call in calls(q_BNSD, k_BKTD, visibility):
        of_queries = [x[call.row, :, call.queries].unflatten(0, (k_BKTD.shape[1], -1)) for x in (grad_BNSD, q_BNSD, *whole)]
        keys, values = (x[call.row][:, call.keys] for x in (k_BKTD, v_BKTD))
        of_q, of_k, of_v = part_gradients(of_queries, keys, values, _mask(call, q_BNSD.dtype), scale)
        of_q_BNSD[call.row, :, call.queries] = of_q.flatten(0, 1)
        of_k_BKTD[call.row][:, call.keys] += of_k
        of_v_BKTD[call.row][:, call.keys] += of_v
    return of_q_BNSD, of_k_BKTD, of_v_BKTD


def _mask(call: Call, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask [Q, L] of a call; it may be as long as the text, so the backward makes it again."""
    return None if call.hides is None else additive(call.hides(), dtype)


def accumulated_in(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over this tensor: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def attend_part(q_KGQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, mask_QL: Tensor | None, scale: float) -> Part:
    """Return output [K, G, Q, D] and log-sum-exp [K, G, Q] of one row, whose queries each see a key; mask None: causality.

    The CPU kernel takes key/value heads as the batch, so a group's heads share keys without copies. On devices whose kernels
    do not take a mask and return a log-sum-exp, one head's scores are made after another's.
    """
    if q_KGQD.device.type == KERNEL_DEVICE:
        keys, values = (x[:, None].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_KLD, v_KLD))
        mask = None if mask_QL is None else mask_QL[None, None]
        return FUSED(q_KGQD, keys, values, is_causal=mask is None, attn_mask=mask, scale=scale)
    assert mask_QL is not None, "no kernel is causal by itself"
    seen, lse = [], []
    for q_GQD, k_LD, v_LD in zip(q_KGQD, k_KLD, v_KLD, strict=True):
        scores_GQL = _scores(q_GQD, k_LD, mask_QL, scale)
        lse.append(scores_GQL.logsumexp(-1))
        seen.append(scores_GQL.sub_(lse[-1][..., None]).exp_().to(v_LD.dtype) @ v_LD)
    return torch.stack(seen), torch.stack(lse)


def part_gradients(of_queries: list[Tensor], k_KLD: Tensor, v_KLD: Tensor, mask_QL: Tensor | None, scale: float) -> Gradients:
    """Return gradients of queries, keys and values of attend_part's one row.

    of_queries: the output's gradient, the queries, and output and log-sum-exp over all keys, including keys not passed here.
    """
    grad_KGQD, q_KGQD, seen_KGQD, lse_KGQ = of_queries
    if k_KLD.device.type != KERNEL_DEVICE:
        assert mask_QL is not None, "no kernel is causal by itself"
        return _plain_gradients(of_queries, k_KLD, v_KLD, mask_QL, scale)
    keys, values = (x[:, None].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_KLD, v_KLD))
    mask = None if mask_QL is None else mask_QL[None, None]
    of_q_KGQD, of_k_KGLD, of_v_KGLD = FUSED_BACKWARD(
        grad_KGQD, q_KGQD, keys, values, seen_KGQD, lse_KGQ, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return of_q_KGQD, of_k_KGLD.sum(1), of_v_KGLD.sum(1)


def _plain_gradients(of_queries: list[Tensor], k_KLD: Tensor, v_KLD: Tensor, mask_QL: Tensor, scale: float) -> Gradients:
    """Return the gradients of one call from all its scores (arXiv 2307.08691, algorithm 2)."""
    grad_KGQD, q_KGQD, seen_KGQD, lse_KGQ = of_queries
    weights_KGQL = _scores(q_KGQD, k_KLD[:, None], mask_QL, scale).sub_(lse_KGQ[..., None]).exp_()
    dot_KGQ1 = (grad_KGQD.to(lse_KGQ.dtype) * seen_KGQD).sum(-1, keepdim=True)
    of_weights_KGQL = (grad_KGQD @ v_KLD[:, None].transpose(2, 3)).to(lse_KGQ.dtype)
    of_scores_KGQL = (of_weights_KGQL.sub_(dot_KGQ1).mul_(weights_KGQL) * scale).to(q_KGQD.dtype)
    of_k_KLD = (of_scores_KGQL.transpose(2, 3) @ q_KGQD).sum(1)
    of_v_KLD = (weights_KGQL.to(grad_KGQD.dtype).transpose(2, 3) @ grad_KGQD).sum(1)
    return of_scores_KGQL @ k_KLD[:, None], of_k_KLD, of_v_KLD


def _scores(q_QD: Tensor, k_LD: Tensor, mask_QL: Tensor, scale: float) -> Tensor:
    """Return scores [..., Q, L], -inf where a key is hidden."""
    return ((q_QD @ k_LD.transpose(-1, -2)).to(accumulated_in(q_QD)) * scale).add_(mask_QL)


def weaken(part: Part, sinks_N: Tensor) -> Tensor:
    """Return the attention output [B, N, S, D] with the sinks added to the softmax of a part."""
    seen_BNSD, lse_BNS = part
    share_BNS = torch.sigmoid(lse_BNS - sinks_N.to(lse_BNS.dtype)[:, None])
    return (seen_BNSD * share_BNS[..., None]).to(seen_BNSD.dtype)
