"""flash_attn_varlen_func and flash_attn_with_kvcache of flash-attn 2.8 in plain PyTorch: their signatures and what its
documentation says of the arguments.

Shapes: P tokens of all sequences one after another, N query heads, K key/value heads, D head width.
"""

from itertools import pairwise

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Output [P, N, D]; the kernel reads beyond its sequences where these checks would fail, and says nothing."""
    others = (dropout_p, softcap, alibi_slopes, return_attn_probs, block_table)
    assert others == (0.0, 0.0, None, False, None)
    for tokens, edges, longest in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k)):
        assert tokens.ndim == 3
        assert tokens.stride(-1) == 1
        assert edges.dtype == torch.int32
        assert edges[0] == 0
        assert edges[-1] == len(tokens)
        assert 0 < longest == edges.diff().max()
        assert edges.diff().min() > 0
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    spans_q, spans_k = pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())
    parts = [
        _one_sequence(q[slice(*span_q)], k[slice(*span_k)], v[slice(*span_k)], scale, causal, window_size)
        for span_q, span_k in zip(spans_q, spans_k, strict=True)
    ]
    return torch.cat(parts)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """Query i stands at key i + len(k) - len(q) (bottom-right alignment); a window of -1 has no end."""
    left, right = window_size
    right = 0 if causal else right
    distance = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("qnd,knd->nqk", q, k.repeat_interleave(repeat, 1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = (scores * scale).masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("nqk,knd->qnd", weights.to(v.dtype), v.repeat_interleave(repeat, 1))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [B, S, N, D] and log-sum-exp, float32 [B, N, S]; of an empty cache 0 and, as the kernel has it, plus infinity."""
    others = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes)
    assert others == (None,) * 8
    assert (causal, window_size, softcap, num_splits, return_softmax_lse) == (False, (-1, -1), 0.0, 0, True)
    assert cache_seqlens is not None
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
