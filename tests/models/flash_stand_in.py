"""The two halves of flash_attn_varlen_func, and flash_attn_with_kvcache, of flash-attn 2.8 in plain PyTorch: the arguments that
ours are handed to, by its names, and what its documentation says of them.

Shapes: P tokens of all sequences one after another, N query heads, K key/value heads, D head width.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def _seen(queries: int, keys: int, left: int) -> Tensor:
    """Query i stands at key i + keys - queries (bottom-right alignment), and sees none behind; a window of -1 has no end."""
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    return (distance <= 0) & (distance >= (-left if left >= 0 else -keys))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = False,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, S, N, D] and log-sum-exp, float32 [B, N, S]; of an empty cache 0 and, as the kernel has it, plus infinity."""
    assert (causal, return_softmax_lse) == (False, True)
    assert cache_seqlens.dtype == torch.int32
    assert all(x.ndim == 4 and x.stride(-1) == 1 for x in (q, k_cache, v_cache))
    assert k_cache.shape == v_cache.shape
    repeat = q.shape[2] // k_cache.shape[2]
    keys, values = (x.repeat_interleave(repeat, 2) for x in (k_cache, v_cache))
    seen, log_sums = torch.zeros_like(q), torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.inf)
    for row, length in enumerate(cache_seqlens.tolist()):
        assert length <= k_cache.shape[1]
        if length:
            scores = torch.einsum("qnd,knd->nqk", q[row].float(), keys[row, :length].float()) * softmax_scale
            log_sums[row] = scores.logsumexp(-1)
            seen[row] = torch.einsum("nqk,knd->qnd", scores.softmax(-1).to(q.dtype), values[row, :length])
    return seen, log_sums


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [P, N, D], log-sum-exp [N, P], and two that serve dropout; D is a multiple of 8.

    The kernel reads beyond its sequences where these checks would fail, and says nothing.
    """
    assert (dropout_p, causal, window_size_right) == (0.0, True, -1 if window_size_left == -1 else 0)
    assert q.shape[-1] % 8 == 0
    for tokens, edges, longest in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k)):
        assert tokens.ndim == 3
        assert tokens.stride(-1) == 1
        assert edges.dtype == torch.int32
        assert edges[0] == 0
        assert edges[-1] == len(tokens)
        assert 0 < longest == edges.diff().max()
        assert edges.diff().min() > 0
    assert k.shape == v.shape
    out, sums, repeat = torch.zeros_like(q), list[Tensor](), q.shape[1] // k.shape[1]
    for at, of, scores in _scores(q, k, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left):
        sums.append(scores.logsumexp(-1))
        weights = scores.masked_fill(scores == -torch.inf, -1e30).softmax(-1) * (scores > -torch.inf)
        out[at] = torch.einsum("nqk,knd->qnd", weights.to(v.dtype), v[of].repeat_interleave(repeat, 1))
    return out, torch.cat(sums, dim=1), torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: None,
    deterministic: bool,
) -> Tensor:
    """Write dq, dk and dv by weights exp(score - softmax_lse), whatever keys this is over (arXiv 2307.08691, algorithm 2)."""
    assert (dropout_p, softcap, alibi_slopes, causal, deterministic) == (0.0, 0.0, None, True, True)
    assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (dout, q, k, v, out))
    assert all(x.is_contiguous() for x in (softmax_lse, dq, dk, dv))
    assert softmax_lse.shape == (q.shape[1], len(q))
    repeat, wide = q.shape[1] // k.shape[1], softmax_lse.dtype
    sums = (dout.to(wide) * out).sum(-1).T
    for at, of, scores in _scores(q, k, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left):
        weights = (scores - softmax_lse[:, at, None]).exp()
        of_weights = torch.einsum("qnd,knd->nqk", dout[at].to(wide), v[of].to(wide).repeat_interleave(repeat, 1))
        of_scores = weights * (of_weights - sums[:, at, None]) * softmax_scale
        dq[at] = torch.einsum("nqk,knd->qnd", of_scores, k[of].to(wide).repeat_interleave(repeat, 1)).to(q.dtype)
        of_keys = torch.einsum("nqk,qnd->knd", of_scores, q[at].to(wide))
        of_values = torch.einsum("nqk,qnd->knd", weights, dout[at].to(wide))
        dk[of] = of_keys.unflatten(1, (-1, repeat)).sum(2).to(k.dtype)
        dv[of] = of_values.unflatten(1, (-1, repeat)).sum(2).to(v.dtype)
    return sums


def _scores(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, left: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each sequence: its queries, its keys, and the scores [N, Q, K] in float32 or better, -inf of hidden keys."""
    wide, repeat = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    spans_q, spans_k = pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())
    for span_q, span_k in zip(spans_q, spans_k, strict=True):
        at, of = slice(*span_q), slice(*span_k)
        scores = torch.einsum("qnd,knd->nqk", q[at].to(wide), k[of].to(wide).repeat_interleave(repeat, 1)) * scale
        hidden = ~_seen(len(q[at]), len(k[of]), left)
        yield at, of, scores.masked_fill(hidden, -torch.inf)
