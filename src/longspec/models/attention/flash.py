"""Attention by flash-attn: its variable-length kernel, one call over the documents of all rows, and its kernel for caches.

A text's part of a softmax that has further keys (sdpa.py) goes through that kernel's two halves, private functions of 2.8.

Shapes: B rows, N query heads, K key/value heads, S queries, T keys, D head width, P tokens of all segments together, Q queries
of one key/value head.
flash-attn aligns causality at the ends of queries and keys, so a lag is a matter of leaving out a document's last keys
and first queries.
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models.attention.visibility import Segment, Visibility, document_starts, nothing_seen

DTYPES = (torch.bfloat16, torch.float16)
TESTED = "2.8"
INSTALL = "pip install '.[gpu]' --no-build-isolation"  # it is compiled against the torch that is there


@dataclass(frozen=True)
class Call:
    """One call of the kernel: segments of one window."""

    queries_P: Tensor | None  # which of the B * S query tokens, int64; None: all, in order
    keys_P: Tensor | None
    query_edges: Tensor  # int32, the segments' edges in queries_P, from 0
    key_edges: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]  # keys that a query sees before and behind its own; (-1, -1): no window


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("flash_attn") is not None


def package() -> Any:
    """Return flash-attn's own module of functions. Raises ValueError with the line that installs it, or another version."""
    if not is_installed():
        raise ValueError(f"runtime.attention: flash_attention_2 is not installed: {INSTALL}")
    from flash_attn import __version__, flash_attn_interface

    if not __version__.startswith(f"{TESTED}."):  # another's halves take other arguments
        raise ValueError(
            f"runtime.attention: flash-attn {__version__} is installed, {TESTED} is needed: {INSTALL}; or set flex_attention "
            "or sdpa"
        )
    return flash_attn_interface


def attend_cached(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, lengths_B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query over its row's first lengths_B[b] keys (int32): output [B, K, Q, D] and log-sum-exp, float32 [B, K, Q].

    Of rows of length 0 neither means anything.
    """
    seen_BQKD, log_sum_BKQ, *_ = package().flash_attn_with_kvcache(
        *(x.transpose(1, 2) for x in (q_BKQD, k_BKTD, v_BKTD)),
        cache_seqlens=lengths_B,
        softmax_scale=scale,
        causal=False,
        return_softmax_lse=True,
    )
    return seen_BQKD.transpose(1, 2), log_sum_BKQ


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """Attention output [B, N, S, D] in flash-attn's dtypes."""
    if visibility.lag_blocks is not None:
        return _attend_by_blocks(q_BNSD, k_BKTD, v_BKTD, visibility, scale)
    rows, _, queries, _ = q_BNSD.shape
    calls = _calls(q_BNSD, k_BKTD, visibility)
    if not calls:
        return nothing_seen(q_BNSD, k_BKTD, v_BKTD)
    q_PND, k_PKD, v_PKD = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNSD, k_BKTD, v_BKTD))
    parts = [_attend_segments(q_PND, k_PKD, v_PKD, call, scale) for call in calls]
    if len(calls) == 1 and calls[0].queries_P is None:
        seen_PND = parts[0]
    else:
        seen_PND = v_PKD.new_zeros(*q_PND.shape[:2], v_PKD.shape[2])
        for call, part in zip(calls, parts, strict=True):
            assert call.queries_P is not None, "several calls share the tokens"
            seen_PND = seen_PND.index_copy(0, call.queries_P, part)
    return seen_PND.unflatten(0, (rows, queries)).transpose(1, 2)


def _attend_by_blocks(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """Lag by blocks of n, as n calls: the query at place r of its block sees what a lag of r + 1 shows it.

    The kernel hides one key more with each query, never n at a time.
    """
    assert visibility.lag_blocks is not None
    rows, keys = q_BNSD.shape[0], k_BKTD.shape[2]
    index_BT = torch.arange(keys, device=q_BNSD.device).expand(1, -1)
    if visibility.document_ids_BT is not None:
        index_BT = index_BT - document_starts(visibility.document_ids_BT)
    place_B1S1 = (index_BT % visibility.lag_blocks)[:, None, keys - q_BNSD.shape[2] :, None]
    seen_BNSD = torch.zeros((), dtype=v_BKTD.dtype, device=v_BKTD.device)
    for place in range(visibility.lag_blocks):
        lag_B = torch.full((rows,), place + 1)
        lagged = visibility.once(("lag", place), partial(replace, visibility, lag_blocks=None, lag_B=lag_B))
        seen_BNSD = torch.where(place_B1S1 == place, attend(q_BNSD, k_BKTD, v_BKTD, lagged, scale), seen_BNSD)
    return seen_BNSD


def _attend_segments(q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor, call: Call, scale: float) -> Tensor:
    """One call of the kernel, [P, N, D]."""
    return package().flash_attn_varlen_func(
        q_PND if call.queries_P is None else q_PND[call.queries_P],
        k_PKD if call.keys_P is None else k_PKD[call.keys_P],
        v_PKD if call.keys_P is None else v_PKD[call.keys_P],
        **_arguments(call, scale),
        window_size=call.window,
        deterministic=True,  # else its backward adds up in any order, and a resumed run is not the uninterrupted one
    )


def attend_text(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> tuple[Tensor, Tensor]:
    """A text, or its last S tokens, over all of it: output [B, N, S, D] and log-sum-exp [B, N, S], 0 and -inf for a query that
    sees no key.
    """
    rows, heads, tokens, width = q_BNSD.shape
    calls = _calls(q_BNSD, k_BKTD, visibility)
    if not calls:
        lse_BNS = q_BNSD.new_full((rows, heads, tokens), -torch.inf, dtype=torch.promote_types(q_BNSD.dtype, torch.float32))
        return torch.zeros_like(q_BNSD), lse_BNS
    (call,) = calls  # without a lag there is one window
    texts = *_taken(call.queries_P, q_BNSD), *_taken(call.keys_P, k_BKTD, v_BKTD)
    seen_PND, lse_NP, *_ = package()._flash_attn_varlen_forward(*texts, **_halves_arguments(call, scale))
    seen_PND = _put_back(seen_PND[..., :width], call, 0, rows * tokens, 0.0)
    lse_NP = _put_back(lse_NP, call, 1, rows * tokens, -torch.inf)
    return seen_PND.unflatten(0, (rows, tokens)).transpose(1, 2), lse_NP.unflatten(1, (rows, tokens)).transpose(0, 1)


def text_gradients(
    grad_BNSD: Tensor,
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    whole: tuple[Tensor, Tensor],
    visibility: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The text's gradients of queries, keys and values; whole: output and log-sum-exp over all keys, the text's and others."""
    seen_BNSD, lse_BNS = whole
    rows, _, tokens, width = q_BNSD.shape
    calls = _calls(q_BNSD, k_BKSD, visibility)
    if not calls:
        return torch.zeros_like(q_BNSD), torch.zeros_like(k_BKSD), torch.zeros_like(v_BKSD)
    (call,) = calls
    grad_PND, q_PND, k_PKD, v_PKD, seen_PND = _taken(call.queries_P, grad_BNSD, q_BNSD, k_BKSD, v_BKSD, seen_BNSD)
    lse_NP = lse_BNS.transpose(0, 1).flatten(1)
    lse_NP = (lse_NP if call.queries_P is None else lse_NP[:, call.queries_P]).contiguous()
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_PND, k_PKD, v_PKD)]
    tensors = grad_PND, q_PND, k_PKD, v_PKD, seen_PND, lse_NP, *parts
    package()._flash_attn_varlen_backward(
        *tensors, **_halves_arguments(call, scale), softcap=0.0, alibi_slopes=None, deterministic=True
    )
    of_q, of_k, of_v = (
        _put_back(part[..., :width], call, 0, rows * tokens, 0.0).unflatten(0, (rows, tokens)).transpose(1, 2) for part in parts
    )
    return of_q, of_k, of_v


def _arguments(call: Call, scale: float) -> dict[str, Any]:
    """Arguments that the kernel and its two halves have in common."""
    return {
        "cu_seqlens_q": call.query_edges,
        "cu_seqlens_k": call.key_edges,
        "max_seqlen_q": call.longest_query,
        "max_seqlen_k": call.longest_key,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": True,
    }


def _halves_arguments(call: Call, scale: float) -> dict[str, Any]:
    """Arguments that the two halves have in common."""
    return _arguments(call, scale) | {"window_size_left": call.window[0], "window_size_right": call.window[1]}


def _taken(chosen_P: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """A call's tokens of each tensor, [P, N, D], widened by zeros to a multiple of 8: the kernel's halves take no other."""
    taken = []
    for x_BNSD in tensors:
        x_PND = x_BNSD.transpose(1, 2).flatten(0, 1)
        x_PND = x_PND if chosen_P is None else x_PND[chosen_P]
        taken.append(x_PND if x_PND.shape[-1] % 8 == 0 else F.pad(x_PND, (0, -x_PND.shape[-1] % 8)))
    return taken


def _put_back(part: Tensor, call: Call, dim: int, tokens: int, filler: float) -> Tensor:
    """A call's tokens, along `dim`, at their places among all."""
    if call.queries_P is None:
        return part
    shape = list(part.shape)
    shape[dim] = tokens
    return part.new_full(shape, filler).index_copy_(dim, call.queries_P, part)


def _calls(q_BNSD: Tensor, k_BKTD: Tensor, visibility: Visibility) -> list[Call]:
    rows, queries, keys = q_BNSD.shape[0], q_BNSD.shape[2], k_BKTD.shape[2]
    return visibility.once(
        ("flash", rows, queries, keys), lambda: _plan(visibility.segments(queries, keys), rows, queries, keys, q_BNSD.device)
    )


def _plan(segments: list[list[Segment]], rows: int, queries: int, keys: int, device: torch.device) -> list[Call]:
    """One call for each window; there are several only where a window meets lags that differ."""
    placed: dict[int | None, list[tuple[int, Segment]]] = {}
    for row in range(rows):
        for segment in segments[row % len(segments)]:
            placed.setdefault(segment.window, []).append((row, segment))
    calls = []
    for window, parts in placed.items():
        query_spans = [(row * queries + part.start, row * queries + part.stop) for row, part in parts]
        key_spans = [(row * keys + part.key_start, row * keys + part.key_stop) for row, part in parts]
        queries_P, query_edges, longest_query = _gathered(query_spans, rows * queries, device)
        keys_P, key_edges, longest_key = _gathered(key_spans, rows * keys, device)
        both = (-1, -1) if window is None else (window, 0)
        calls.append(Call(queries_P, keys_P, query_edges, key_edges, longest_query, longest_key, both))
    return calls


def _gathered(spans: list[tuple[int, int]], tokens: int, device: torch.device) -> tuple[Tensor | None, Tensor, int]:
    """Indices of the spans' tokens one after another (None: all, in order), the spans' edges there, the longest span."""
    lengths = [stop - start for start, stop in spans]
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    if sum(lengths) == tokens:
        return None, edges, max(lengths)
    return torch.cat([torch.arange(*span, device=device) for span in spans]), edges, max(lengths)
