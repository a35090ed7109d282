"""A text's attention over itself as one part of a softmax that has further keys: by torch's CPU kernel, and in plain blocks.

A kernel's backward makes its weights anew, exp(score - log-sum-exp), and needs the output for one sum alone. Given output and
log-sum-exp over all keys it therefore yields what its own keys have in the gradients, and needs no weight of the others
(FlashAttention-2, arXiv 2307.08691, section 3.1.2).

Shapes: B rows, N query heads, K key/value heads, G = N / K, S tokens, D head width, Q queries and L keys of one call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.models.attention import sdpa
from longspec.models.attention.visibility import Visibility

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

    def make() -> Tensor:
        hidden_QL = _is_hidden(call, like.device)
        return torch.zeros_like(hidden_QL, dtype=like.dtype).masked_fill_(hidden_QL, -torch.inf)[None, None]

    return visibility.once(("text mask", call.stop - call.start, call.stop - call.low, call.window, like.dtype), make)


def _is_hidden(call: Call, device: torch.device) -> Tensor:
    """Which keys a call's queries do not see, [Q, L]."""
    back_QL = torch.arange(call.start, call.stop, device=device)[:, None] - torch.arange(call.low, call.stop, device=device)
    return back_QL < 0 if call.window is None else (back_QL < 0) | (back_QL > call.window)


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
    return scores_KGQL.masked_fill_(_is_hidden(call, q_KGQD.device), -torch.inf)


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
