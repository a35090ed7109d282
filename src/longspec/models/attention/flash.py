"""Attend with flash-attn: its variable-length kernel, one call over the documents of all rows, and its kernel for caches.

The first is called by its two halves, private functions of 2.8, since a text may be one part of a softmax with further keys
(chains.py).

Shapes: B rows, N query heads, K key/value heads, S queries, T keys, D head width, P tokens of all segments together, Q queries
of one key/value head.
flash-attn aligns causality at the ends of queries and keys, so a lag means to leave out a document's last keys and first
queries.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models.attention.sdpa import Part
from longspec.models.attention.visibility import Segment, Visibility
from longspec.shown import brief

DTYPES = (torch.bfloat16, torch.float16)
TESTED = "2.8"
# Compiled against the installed torch. No extra of this package, since the command would copy an editable install.
INSTALL = "pip install wheel ninja packaging && pip install -c constraints.txt --no-build-isolation flash-attn"


@dataclass(frozen=True)
class Call:
    """Hold the arguments of one kernel call: segments with one window."""

    queries_P: Tensor | None  # indices among the B * S query tokens, int64; None: all, in order
    keys_P: Tensor | None
    query_edges: Tensor  # int32, the segments' edges in queries_P, from 0
    key_edges: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]  # number of keys seen before and after a query's own; (-1, -1): no window


def is_installed() -> bool:
    return find_spec("flash_attn") is not None


def unusable() -> str:
    """Return why flash-attn cannot be used here, with the line that installs it; "" if it can."""
    if not is_installed():
        return f"flash-attn is not installed: {INSTALL}"
    try:
        from flash_attn import __version__, flash_attn_interface  # noqa: F401
    except Exception as error:  # a build for another torch may raise anything
        return f"flash-attn cannot be imported ({brief(error)}): {INSTALL}"
    if __version__.startswith(f"{TESTED}."):
        return ""
    return f"flash-attn {__version__} is installed, {TESTED} is needed: {INSTALL}"  # others' halves take other arguments


def package() -> Any:
    """Return flash-attn's own module of functions. Raises ValueError if it cannot be used."""
    if why := unusable():
        raise ValueError(f"runtime.attention: flash_attention_2: {why}; or set flex_attention or sdpa")
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def attend_cached(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, lengths_B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [B, K, Q, D] and log-sum-exp, float32 [B, K, Q], of queries over their row's first lengths_B[b] keys.

    lengths_B: int32. In rows of length 0 both are undefined.
    """
    seen_BQKD, log_sum_BKQ, *_ = package().flash_attn_with_kvcache(
        *(x.transpose(1, 2) for x in (q_BKQD, k_BKTD, v_BKTD)),
        cache_seqlens=lengths_B,
        softmax_scale=scale,
        causal=False,
        return_softmax_lse=True,
    )
    return seen_BQKD.transpose(1, 2), log_sum_BKQ


def attend_text(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility, scale: float) -> Part:
    """Return output and log-sum-exp of a text, or of its last S tokens, over the whole text."""
    rows, heads, tokens, width = q_BNSD.shape
    wide = torch.promote_types(q_BNSD.dtype, torch.float32)
    calls = _calls(q_BNSD, k_BKTD, visibility)
    room = 0 if any(call.queries_P is None for call in calls) else rows * tokens  # a call of all queries needs none
    seen_PND = q_BNSD.new_zeros(room, heads, width)
    lse_NP = q_BNSD.new_full((heads, room), -torch.inf, dtype=wide)
    for call in calls:
        texts = *_taken(call.queries_P, q_BNSD), *_taken(call.keys_P, k_BKTD, v_BKTD)
        part_PND, lse_part_NP, *_ = package()._flash_attn_varlen_forward(*texts, **_arguments(call, scale))
        seen_PND = _put_back(seen_PND, part_PND[..., :width], call.queries_P, 0)
        lse_NP = _put_back(lse_NP, lse_part_NP, call.queries_P, 1)
    return seen_PND.unflatten(0, (rows, tokens)).transpose(1, 2), lse_NP.unflatten(1, (rows, tokens)).transpose(0, 1)


def text_gradients(
    grad_BNSD: Tensor, q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, whole: Part, visibility: Visibility, scale: float
) -> tuple[Tensor, ...]:
    """Return the text's gradients of queries, keys, values. whole: output and log-sum-exp over all keys, also other parts'."""
    width, lse_NP = q_BNSD.shape[-1], whole[1].transpose(0, 1).flatten(1)
    calls = _calls(q_BNSD, k_BKTD, visibility)
    whole_queries, whole_keys = any(call.queries_P is None for call in calls), any(call.keys_P is None for call in calls)
    found = [
        x.new_zeros(0 if is_whole else x.shape[0] * x.shape[2], x.shape[1], width)
        for x, is_whole in ((q_BNSD, whole_queries), (k_BKTD, whole_keys), (v_BKTD, whole_keys))
    ]
    for call in calls:
        grad_PND, q_PND, seen_PND = _taken(call.queries_P, grad_BNSD, q_BNSD, whole[0])
        k_PKD, v_PKD = _taken(call.keys_P, k_BKTD, v_BKTD)
        lse_part_NP = (lse_NP if call.queries_P is None else lse_NP[:, call.queries_P]).contiguous()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_PND, k_PKD, v_PKD)]
        package()._flash_attn_varlen_backward(
            *(grad_PND, q_PND, k_PKD, v_PKD, seen_PND, lse_part_NP, *parts),
            **_arguments(call, scale),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=True,  # else the order of sums varies, and a resumed run differs from an uninterrupted one
        )
        places = call.queries_P, call.keys_P, call.keys_P
        found = [_put_back(x, part[..., :width], place, 0) for x, part, place in zip(found, parts, places, strict=True)]
    return tuple(x.unflatten(0, (len(q_BNSD), -1)).transpose(1, 2) for x in found)


def _arguments(call: Call, scale: float) -> dict[str, Any]:
    """Return the arguments that the kernel's two halves share."""
    return {
        "cu_seqlens_q": call.query_edges,
        "cu_seqlens_k": call.key_edges,
        "max_seqlen_q": call.longest_query,
        "max_seqlen_k": call.longest_key,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": call.window[0],
        "window_size_right": call.window[1],
    }


def _taken(chosen_P: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Return a call's tokens of each tensor, [P, N, D], padded with zeros to a width divisible by 8, which the kernel needs."""
    taken = []
    for x_BNSD in tensors:
        x_PND = x_BNSD.transpose(1, 2).flatten(0, 1)
        x_PND = x_PND if chosen_P is None else x_PND[chosen_P]
        taken.append(x_PND if x_PND.shape[-1] % 8 == 0 else F.pad(x_PND, (0, -x_PND.shape[-1] % 8)))
    return taken


def _put_back(whole: Tensor, part: Tensor, places_P: Tensor | None, dim: int) -> Tensor:
    """Return all tokens with a call's tokens put at their places along `dim`."""
    return part if places_P is None else whole.index_copy_(dim, places_P, part)


def _calls(q_BNSD: Tensor, k_BKTD: Tensor, visibility: Visibility) -> list[Call]:
    rows, queries, keys = q_BNSD.shape[0], q_BNSD.shape[2], k_BKTD.shape[2]
    return visibility.once(
        ("flash", rows, queries, keys), lambda: _plan(visibility.segments(queries, keys), rows, queries, keys, q_BNSD.device)
    )


def _plan(segments: list[list[Segment]], rows: int, queries: int, keys: int, device: torch.device) -> list[Call]:
    """Return one call for each window; there are several only if a window meets different lags."""
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
    """Return indices of the spans' tokens in sequence (None: all, in order), the spans' edges there, and the longest span."""
    lengths = [stop - start for start, stop in spans]
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    if sum(lengths) == tokens:
        return None, edges, max(lengths)
    return torch.cat([torch.arange(*span, device=device) for span in spans]), edges, max(lengths)
