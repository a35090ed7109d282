"""Attention that hands out the log-sum-exp of its scores: a text over itself as one part of a softmax that has more in it.

The rest of the softmax may be further keys (chains.py). A kernel's backward makes its weights anew, exp(score - log-sum-exp),
and needs the output for one sum alone. Given output and log-sum-exp over all keys it therefore yields what its own keys have in
the gradients, and needs no weight of the others (FlashAttention-2, arXiv 2307.08691, section 3.1.2).

Or the rest is a sink: a learned number for each query head joins the softmax as one more score, of a key without a value. With
L the log-sum-exp of the keys' scores and s the sink, every weight is multiplied by exp(L) / (exp(L) + exp(s)), which is
sigmoid(L - s) (GPT-OSS, arXiv 2508.10925). A target alone has sinks: what serves them alone has no backward.

By torch's CPU kernel; elsewhere the scores are made, for a block of queries at a time.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width, Q queries and L keys of one call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.models.attention import sdpa
from longspec.models.attention.visibility import Segment, TreeVisibility, Visibility, additive, is_hidden

# The kernels that torch's own function calls on a CPU; only direct calls return and take a log-sum-exp.
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNEL_DEVICE = "cpu"  # elsewhere all scores of a block of queries are made
Part = tuple[Tensor, Tensor]  # output [B, N, S, D] and log-sum-exp [B, N, S]; 0 and -inf of queries that see no key
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """Queries [start, stop) of one row over the keys [low, stop)."""

    row: int
    start: int
    stop: int
    low: int
    window: int | None  # None: it hides none of these keys

    @property
    def queries(self) -> tuple[int, slice, slice]:
        """Where the queries lie in [B, N, S]."""
        return self.row, slice(None), slice(self.start, self.stop)

    @property
    def keys(self) -> tuple[int, slice, slice]:
        """Where the keys lie in [B, K, S]."""
        return self.row, slice(None), slice(self.low, self.stop)


def attend(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visibility: Visibility, scale: float) -> Part:
    """The text's part."""
    one_call: Callable[..., tuple[Tensor, Tensor]] = _fused if q_BNSD.device.type == KERNEL_DEVICE else _plain
    (rows, heads, length, _), width = q_BNSD.shape, v_BKSD.shape[-1]
    seen_BNSD = v_BKSD.new_zeros(rows, length, heads, width).transpose(1, 2)
    lse_BNS = q_BNSD.new_full((rows, heads, length), -torch.inf, dtype=accumulated_in(q_BNSD))
    for call in _calls(q_BNSD, visibility):
        q_KGQD = q_BNSD[call.queries].unflatten(0, (k_BKSD.shape[1], -1))
        seen_KGQD, lse_KGQ = one_call(q_KGQD, k_BKSD[call.keys], v_BKSD[call.keys], call, visibility, scale)
        seen_BNSD[call.queries].unflatten(0, q_KGQD.shape[:2]).copy_(seen_KGQD)
        lse_BNS[call.queries].unflatten(0, q_KGQD.shape[:2]).copy_(lse_KGQ)
    return seen_BNSD, lse_BNS


def gradients(
    grad_BNSD: Tensor, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, whole: Part, visibility: Visibility, scale: float
) -> Gradients:
    """The part's gradients of queries, keys and values; whole: output and log-sum-exp over all keys, the part's and others."""
    one_call: Callable[..., Gradients] = _fused_gradients if q_BNSD.device.type == KERNEL_DEVICE else _plain_gradients
    of_q_BNSD = torch.zeros_like(q_BNSD)
    of_k_BKSD, of_v_BKSD = torch.zeros_like(k_BKSD), torch.zeros_like(v_BKSD)
    heads = k_BKSD.shape[1], q_BNSD.shape[1] // k_BKSD.shape[1]
    for call in _calls(q_BNSD, visibility):
        of_queries = [x[call.queries].unflatten(0, heads) for x in (grad_BNSD, q_BNSD, *whole)]
        of_q, of_k, of_v = one_call(of_queries, k_BKSD[call.keys], v_BKSD[call.keys], call, visibility, scale)
        of_q_BNSD[call.queries].unflatten(0, heads).copy_(of_q)
        of_k_BKSD[call.keys].add_(of_k)
        of_v_BKSD[call.keys].add_(of_v)
    return of_q_BNSD, of_k_BKSD, of_v_BKSD


def accumulated_in(x: Tensor) -> torch.dtype:
    """The dtype of sums over this tensor: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def _calls(q_BNSD: Tensor, visibility: Visibility) -> list[Call]:
    """The calls of one attention, in order. Documents that no window cuts are one call each where a kernel is causal itself."""
    assert visibility.lag_B is None, "a text sees itself without a lag"
    assert visibility.lag_blocks is None, "a text sees itself without a lag"
    rows, _, length, _ = q_BNSD.shape
    has_kernel = q_BNSD.device.type == KERNEL_DEVICE
    return visibility.once(("text calls", rows, length, has_kernel), lambda: _planned(visibility, rows, length, has_kernel))


def _planned(visibility: Visibility, rows: int, length: int, has_kernel: bool) -> list[Call]:
    segments, calls = visibility.segments(length, length), []
    for row in range(rows):
        for segment in segments[row % len(segments)]:
            if has_kernel and not segment.is_windowed:
                calls.append(Call(row, segment.start, segment.stop, segment.start, None))
                continue
            for start in range(segment.start, segment.stop, sdpa.QUERY_BLOCK):
                stop = min(start + sdpa.QUERY_BLOCK, segment.stop)
                low = segment.start if segment.window is None else max(segment.start, start - segment.window)
                hides = segment.window is not None and segment.window < stop - low - 1
                calls.append(Call(row, start, stop, low, segment.window if hides else None))
    return calls


def _fused(
    q_KGQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, call: Call, visibility: Visibility, scale: float
) -> tuple[Tensor, Tensor]:
    """One call of the CPU kernel: key/value heads are its batch, so that a group's heads share keys which nobody repeats."""
    keys, values = (x[:, None].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_KLD, v_KLD))
    mask = _mask(call, visibility, q_KGQD)
    return FUSED(q_KGQD, keys, values, is_causal=mask is None, attn_mask=mask, scale=scale)


def _fused_gradients(
    of_queries: list[Tensor], k_KLD: Tensor, v_KLD: Tensor, call: Call, visibility: Visibility, scale: float
) -> Gradients:
    """One call of the CPU kernel's backward."""
    grad_KGQD, q_KGQD, seen_KGQD, lse_KGQ = of_queries
    keys, values = (x[:, None].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_KLD, v_KLD))
    mask = _mask(call, visibility, q_KGQD)
    of_q_KGQD, of_k_KGLD, of_v_KGLD = FUSED_BACKWARD(
        grad_KGQD, q_KGQD, keys, values, seen_KGQD, lse_KGQ, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    if q_KGQD.shape[1] == 1:
        return of_q_KGQD, of_k_KGLD[:, 0], of_v_KGLD[:, 0]
    return of_q_KGQD, of_k_KGLD.sum(1), of_v_KGLD.sum(1)


def _mask(call: Call, visibility: Visibility, like: Tensor) -> Tensor | None:
    """The additive mask [1, 1, Q, L] of a call, one for all calls of its shape; None where the kernel's own causality does."""
    if call.low == call.start and call.window is None:  # as many keys as queries
        return None
    key = ("text mask", call.stop - call.start, call.stop - call.low, call.window, like.dtype)
    return visibility.once(key, lambda: additive(_hidden_of(call, like.device), like.dtype)[None, None])


def _hidden_of(call: Call, device: torch.device) -> Tensor:
    """Which keys a call's queries do not see, [Q, L]."""
    return is_hidden(range(call.start, call.stop), range(call.low, call.stop), call.window, device)


def _plain(
    q_KGQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, call: Call, visibility: Visibility, scale: float
) -> tuple[Tensor, Tensor]:
    """One call by all its scores, for devices whose kernels take no windows with a log-sum-exp."""
    scores_KGQL = _scores(q_KGQD, k_KLD, call, scale)
    lse_KGQ = scores_KGQL.logsumexp(-1)
    weights_KGQL = (scores_KGQL - lse_KGQ[..., None]).exp_().to(v_KLD.dtype)
    return weights_KGQL @ v_KLD[:, None], lse_KGQ


def _plain_gradients(
    of_queries: list[Tensor], k_KLD: Tensor, v_KLD: Tensor, call: Call, visibility: Visibility, scale: float
) -> Gradients:
    """The gradients of one call by all its scores (arXiv 2307.08691, algorithm 2)."""
    grad_KGQD, q_KGQD, seen_KGQD, lse_KGQ = of_queries
    weights_KGQL = (_scores(q_KGQD, k_KLD, call, scale) - lse_KGQ[..., None]).exp_()
    dot_KGQ1 = (grad_KGQD.to(lse_KGQ.dtype) * seen_KGQD).sum(-1, keepdim=True)
    of_weights_KGQL = (grad_KGQD @ v_KLD[:, None].transpose(2, 3)).to(lse_KGQ.dtype)
    of_scores_KGQL = (of_weights_KGQL.sub_(dot_KGQ1).mul_(weights_KGQL) * scale).to(q_KGQD.dtype)
    of_k_KLD = (of_scores_KGQL.transpose(2, 3) @ q_KGQD).sum(1)
    of_v_KLD = (weights_KGQL.to(grad_KGQD.dtype).transpose(2, 3) @ grad_KGQD).sum(1)
    return of_scores_KGQL @ k_KLD[:, None], of_k_KLD, of_v_KLD


def _scores(q_KGQD: Tensor, k_KLD: Tensor, call: Call, scale: float) -> Tensor:
    """Scores [K, G, Q, L], -inf where a key is hidden; every query sees itself."""
    scores_KGQL = (q_KGQD @ k_KLD[:, None].transpose(2, 3)).to(accumulated_in(q_KGQD)) * scale
    return scores_KGQL.masked_fill_(_hidden_of(call, q_KGQD.device), -torch.inf)


def block_bytes(heads: int, width: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of one call's scores in the backward, for a text of so many keys; none where a kernel keeps them to itself.

    Three in float32 at once, weights, their gradient and that of the scores, one more in a narrower dtype of the queries; and
    the keys or values of the call, repeated for each query head.
    """
    if device.type == KERNEL_DEVICE:
        return 0
    seen = keys if window is None else min(keys, sdpa.QUERY_BLOCK + window)
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    return heads * seen * (min(keys, sdpa.QUERY_BLOCK) * (12 + narrow) + width * dtype.itemsize)


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
                keys, is_hidden_QL = _keys_of(segment, block, q_BNSD.device)
                part = attend_masked(q_BNSD[row, :, block], k_BKTD[row, :, keys], v_BKTD[row, :, keys], is_hidden_QL, scale)
                seen_BNSD[row, :, block], lse_BNS[row, :, block] = part
    return seen_BNSD, lse_BNS


def _keys_of(segment: Segment, block: slice, device: torch.device) -> tuple[slice, Tensor]:
    """The keys that a block of a segment's queries may see, and which of them each does not see, [Q, L]."""
    high = segment.key_stop - (segment.stop - block.stop)
    first = high - (block.stop - block.start)  # the key at which the first query stands
    low = segment.key_start if segment.window is None else max(segment.key_start, first - segment.window)
    return slice(low, high), is_hidden(range(first, high), range(low, high), segment.window, device)


def attend_masked(q_NQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, is_hidden_QL: Tensor, scale: float) -> Part:
    """Output [N, Q, D] and log-sum-exp [N, Q] of one row; each of its queries sees a key."""
    q_KGQD = q_NQD.unflatten(0, (k_KLD.shape[0], -1))
    mask_QL = additive(is_hidden_QL, q_NQD.dtype)
    if q_NQD.device.type == KERNEL_DEVICE:
        keys, values = (x[:, None].expand(-1, q_KGQD.shape[1], -1, -1) for x in (k_KLD, v_KLD))
        seen_KGQD, lse_KGQ = FUSED(q_KGQD, keys, values, attn_mask=mask_QL[None, None], scale=scale)
        return seen_KGQD.flatten(0, 1), lse_KGQ.flatten(0, 1)
    parts = [_plain_head(*head, mask_QL, scale) for head in zip(q_KGQD, k_KLD, v_KLD, strict=True)]
    seen, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return seen, lse


def _plain_head(q_GQD: Tensor, k_LD: Tensor, v_LD: Tensor, mask_QL: Tensor, scale: float) -> Part:
    """The queries of one key/value head, by all their scores."""
    scores_GQL = (q_GQD @ k_LD.T).to(accumulated_in(q_GQD)) * scale + mask_QL
    lse_GQ = scores_GQL.logsumexp(-1)
    return (scores_GQL - lse_GQ[..., None]).exp_().to(v_LD.dtype) @ v_LD, lse_GQ


def attend_masked_tree(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Part:
    """Output and log-sum-exp of a tree's nodes, each of which sees itself, over the prefix and each other, row by row."""
    prefix = k_BKTD.shape[2] - visibility.tree_BSL.shape[2]
    low = visibility.unseen(prefix)
    is_hidden_BST = ~visibility.without(low).mask_BST(prefix - low)
    rows = zip(q_BNSD, k_BKTD[:, :, low:], v_BKTD[:, :, low:], is_hidden_BST.expand(len(q_BNSD), -1, -1), strict=True)
    seen, lse = (torch.stack(part) for part in zip(*(attend_masked(*row, scale) for row in rows), strict=True))
    return seen, lse
