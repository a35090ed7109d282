"""Choose an attention backend, and attend over texts, blocks and draft trees, also as transformers' hook.

All nodes of a tree see the same cached prefix (LongSpec 3.3, hybrid tree attention). So flash-attn's kernel takes the prefix
without a mask of queries by keys, and the few tree keys have a small mask. The two parts are weighted by their sums of
exponentials, whose logarithms both return. Elsewhere one call takes one mask.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S queries, T keys, D head width; T >= S, and the last query is at
the last key. Of a tree: P prefix keys, L tree keys, T = P + L keys, Q = G * S queries of one key/value head.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton
from transformers import AttentionInterface

from longspec.models.attention import flash, flex, sdpa
from longspec.models.attention.sdpa import Part
from longspec.models.attention.visibility import Remembering, TreeVisibility, Visibility, additive, dense

_log = logging.getLogger(__name__)

AUTO, FLASH, FLEX, SDPA = "auto", "flash_attention_2", "flex_attention", "sdpa"
BACKENDS = (FLASH, FLEX, SDPA)
# Functions that return output and log-sum-exp of a text, or of its last tokens, over the whole text.
PARTS: dict[str, Callable[..., Part]] = {FLASH: flash.attend_text, FLEX: flex.attend_text, SDPA: sdpa.attend_text}


def attend(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    visibility: Remembering,
    scale: float,
    backend: str = AUTO,
    *,
    own: Sequence[tuple[Tensor, Tensor]] = (),
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the attention output [B, N, S, D], equal in all backends up to the dtype's tolerance; 0 for a query without keys.

    k_BKTD, v_BKTD: of the text, or of a tree's prefix and its nodes. own: keys and values of drafted blocks, or of each step
    of chains, as many as queries. sinks_N: one for each query head, added to its softmax; only targets have them, so they get
    no gradient. Raises ValueError for flex with a gradient on a CPU.
    """
    everything = [dense(x) for x in (q_BNSD, k_BKTD, v_BKTD, *(x for pair in own for x in pair))]
    if backend == AUTO:
        training = not isinstance(visibility, TreeVisibility) and flex.needs_gradient(*everything)
        backend = fastest(q_BNSD.device.type, q_BNSD.dtype, q_BNSD.shape[-1], training)
    if isinstance(visibility, TreeVisibility):
        if sinks_N is None:
            return _attend_tree(q_BNSD, k_BKTD, v_BKTD, visibility, scale, backend)
        # All nodes and keys share one mask, and no GPU kernel both takes a mask and returns its log-sum-exp.
        return sdpa.weaken(_attend_tree_by_rows(q_BNSD, k_BKTD, v_BKTD, visibility, scale), sinks_N)
    if sinks_N is not None:
        return sdpa.weaken(PARTS[backend](q_BNSD, k_BKTD, v_BKTD, visibility, scale), sinks_N)
    if backend == SDPA and isinstance(visibility, Visibility) and not own:
        return sdpa.attend(everything[0], everything[1], everything[2], visibility, scale)
    from longspec.models.attention import blocks, chains  # a text with torch's own kernels needs neither

    ways = blocks.WAYS if isinstance(visibility, blocks.BlockVisibility) else chains.WAYS
    return ways[backend](visibility, scale, *everything)


def check_backend(name: str) -> None:
    """Raise ValueError, with the fix, for a backend that is unknown or not installed."""
    if name not in (AUTO, *BACKENDS):
        raise ValueError(f"runtime.attention: {name!r} is unknown; choose one of {', '.join([AUTO, *BACKENDS])}")
    if name == FLASH:
        flash.package()


def choose(wanted: str, device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """Return the backend that training uses if `wanted` is asked for.

    Raises ValueError, with the fix, if it is unknown, not installed, or cannot train on this device in this dtype.
    """
    check_backend(wanted)
    if wanted == AUTO:
        return fastest(device.type, dtype, head_width, True)
    if wanted == FLASH and device.type != "cuda":
        raise ValueError(f"runtime.attention: flash_attention_2 runs on CUDA GPUs, this is a {device.type}: set auto or sdpa")
    if wanted == FLASH and dtype not in flash.DTYPES:
        raise ValueError(
            f"runtime.attention: flash_attention_2 takes bfloat16 and float16, not {dtype}: set recipe.precision: bf16, or"
            " runtime.attention: auto"
        )
    if wanted == FLEX and device.type == "cpu":
        raise ValueError(flex.NO_BACKWARD)
    if wanted == FLEX and (why := _not_compiled(head_width)):
        raise ValueError(f"runtime.attention: flex_attention: {why}: set auto or sdpa")
    return wanted


def _not_compiled(head_width: int) -> str:
    """Return why flex_attention cannot be compiled for a GPU here; "" if it can."""
    if not has_triton():
        return "triton is not installed, so it cannot be compiled"
    if head_width < flex.LEAST_HEAD_WIDTH:
        return f"heads of width {head_width} are below the {flex.LEAST_HEAD_WIDTH} that its kernels take"
    return ""


@cache
def fastest(device: str, dtype: torch.dtype, head_width: int, training: bool) -> str:
    """Return the fastest available backend; each kind of call is logged once.

    Outside training, as in decoding, lengths change from call to call, and flex_attention would compile for each.
    """
    if device != "cuda":
        backend, why = SDPA, f"the fastest on a {device}"
    elif not (missing := flash.unusable() if dtype in flash.DTYPES else f"flash-attn does not take {dtype}"):
        backend, why = FLASH, "installed, and takes this dtype"
    elif training and not (compiled := _not_compiled(head_width)):
        backend, why = FLEX, missing
    else:
        backend, why = SDPA, f"flex_attention: {compiled}" if training else f"for lengths that change; {missing}"
    _log.info("attention: auto is %s (%s)", backend, why)
    return backend


def score_bytes(heads: int, width: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a text's scores that the backward holds at once; 0 if a kernel never stores them, or no GPU is here.

    Three in float32: weights, their gradient and that of the scores; one more if the queries' dtype is narrower; and the call's
    keys or values, repeated for each query head.
    """
    if device.type == sdpa.KERNEL_DEVICE or not torch.cuda.is_available() or fastest(device.type, dtype, width, True) != SDPA:
        return 0
    seen = keys if window is None else min(keys, sdpa.QUERY_BLOCK + window)
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    return heads * seen * (min(keys, sdpa.QUERY_BLOCK) * (12 + narrow) + width * dtype.itemsize)


def _attend_tree(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float, backend: str
) -> Tensor:
    """Return a tree's attention output [B, N, S, D], by flash-attn if no window hides prefix keys.

    Otherwise one call takes a mask as wide as the window and the tree, made once for all layers. On two EPYC cores this takes
    0.6 of the time of separate prefix and tree after 200 tokens, and the same after 4,000 (17 nodes, groups of three heads).
    """
    if k_BKTD.shape[2] == 0:
        return torch.zeros_like(q_BNSD)
    tree, groups = visibility.tree_BSL.shape[2], q_BNSD.shape[1] // k_BKTD.shape[1]
    prefix = k_BKTD.shape[2] - tree
    q_BKQD = q_BNSD.unflatten(1, (-1, groups)).flatten(2, 3)  # groups of heads become further queries: no key is repeated

    def masks() -> tuple[Tensor, Tensor]:
        seen_B1QT = visibility.without(low).mask_BST(prefix - low).repeat(1, groups, 1)[:, None]
        blind_B1Q1 = ~seen_B1QT.any(dim=-1, keepdim=True)
        # A row without a key would make NaN in some kernels.
        return additive(~(seen_B1QT | blind_B1Q1), q_BKQD.dtype), blind_B1Q1

    sees_prefix = visibility.first_B is None and (visibility.window is None or k_BKTD.shape[2] <= visibility.window)
    if backend == FLASH and sees_prefix:
        seen_BKQD = _attend_flash(q_BKQD, k_BKTD, v_BKTD, visibility, scale)
    else:
        low = visibility.unseen(prefix)
        mask_B1QT, blind_B1Q1 = visibility.once(("queries", prefix, groups), masks)
        keys, values = k_BKTD[:, :, low:], v_BKTD[:, :, low:]
        seen_BKQD = F.scaled_dot_product_attention(q_BKQD, keys, values, attn_mask=mask_B1QT, scale=scale)
        if not tree:  # nodes see themselves, so only queries without a tree can be blind
            seen_BKQD = seen_BKQD.masked_fill(blind_B1Q1, 0.0)
    return seen_BKQD.unflatten(2, (-1, q_BNSD.shape[2])).flatten(1, 2)


def attend_all(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    """Return the attention output [B, N, S, D] of queries that see all keys."""
    q_BKQD = q_BNSD.unflatten(1, (k_BKTD.shape[1], -1)).flatten(2, 3)  # groups of heads become further queries
    seen_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKTD, v_BKTD, scale=scale)
    return seen_BKQD.unflatten(2, (-1, q_BNSD.shape[2])).flatten(1, 2)


def _attend_tree_by_rows(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Part:
    """Return output and log-sum-exp of a tree's nodes over the prefix and the tree, row by row. Each node must see itself."""
    prefix = k_BKTD.shape[2] - visibility.tree_BSL.shape[2]
    low = visibility.unseen(prefix)
    hidden_BST = visibility.once(("rows", prefix), lambda: ~visibility.without(low).mask_BST(prefix - low))
    mask_BST = additive(hidden_BST, q_BNSD.dtype).expand(len(q_BNSD), -1, -1)
    q_BKGSD = q_BNSD.unflatten(1, (k_BKTD.shape[1], -1))
    rows = zip(q_BKGSD, k_BKTD[:, :, low:], v_BKTD[:, :, low:], mask_BST, strict=True)
    seen, lse = (torch.stack(part) for part in zip(*(sdpa.attend_part(*row, scale) for row in rows), strict=True))
    return seen.flatten(1, 2), lse.flatten(1, 2)


def _attend_flash(q_BKQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: TreeVisibility, scale: float) -> Tensor:
    """Return a tree's attention as two parts, merged: the prefix by flash-attn's kernel for caches, which takes no masks, and
    the few keys of the tree from all scores, in float32.
    """
    tree = visibility.tree_BSL.shape[2]
    prefix, groups = k_BKTD.shape[2] - tree, q_BKQD.shape[2] // visibility.query_depths_S.shape[0]
    lengths_B = visibility.once("int32", lambda: visibility.lengths_B.to(torch.int32))
    seen_BKQD, log_sum_BKQ = flash.attend_cached(q_BKQD, k_BKTD[:, :, :prefix], v_BKTD[:, :, :prefix], lengths_B, scale)
    if 0 in visibility.lengths:  # for an empty prefix kernels return anything
        empty_B111 = (visibility.lengths_B == 0)[:, None, None, None]
        seen_BKQD = seen_BKQD.masked_fill(empty_B111, 0.0)
        log_sum_BKQ = log_sum_BKQ.masked_fill(empty_B111[..., 0], -torch.inf)
    if not tree:
        return seen_BKQD
    # Hides from each node the nodes that are not on its path.
    mask_B1QL = visibility.once("tree", lambda: additive(~visibility.tree_BSL.repeat(1, groups, 1)[:, None], torch.float32))
    scores_BKQL = (q_BKQD.float() * scale) @ k_BKTD[:, :, prefix:].float().transpose(2, 3) + mask_B1QL
    tree_BKQD = scores_BKQL.softmax(-1) @ v_BKTD[:, :, prefix:].float()
    # Every node sees itself, so the tree's part is never empty: a / (a + b) = sigmoid(log a - log b).
    of_tree_BKQ1 = torch.sigmoid(scores_BKQL.logsumexp(-1) - log_sum_BKQ)[..., None]
    return torch.lerp(seen_BKQD.float(), tree_BKQD, of_tree_BKQ1).to(v_BKTD.dtype)


# Arguments that layers pass to their attention, but that are used before it or elsewhere.
WITHOUT_EFFECT = ("position_ids", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch")


def target_attention(
    module: torch.nn.Module,
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    visibility: Visibility | TreeVisibility | None = None,
    attention_backend: str = AUTO,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention hook, [B, S, N, D]. `visibility` has the documents; positions never imply them.

    One `visibility` passed to the target's forward serves all its layers; `sliding_window` is the layer's own and counts the
    query itself; `s_aux` [N] are its sinks. Raises ValueError for any other argument that may change what is attended to.
    """
    strange = [name for name, value in others.items() if value is not None and name not in WITHOUT_EFFECT]
    if strange:
        raise ValueError(f"{', '.join(strange)}: not known to this attention ({TARGET_ATTENTION}); leave it out of the forward")
    assert attention_mask is None, "documents replace padding masks"
    assert dropout == 0.0, "targets run without dropout"
    seen = visibility or Visibility()
    if sliding_window is not None:
        seen = seen.windowed(sliding_window - 1)
    seen_BNSD = attend(q_BNSD, k_BKTD, v_BKTD, seen, scaling, attention_backend, sinks_N=s_aux)
    return seen_BNSD.transpose(1, 2), None


# No mask function is registered under this name, so transformers makes no mask and does not guess packing from positions.
TARGET_ATTENTION = "longspec"
AttentionInterface.register(TARGET_ATTENTION, target_attention)
