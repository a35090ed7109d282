"""The one door to attention: the choice of a backend, attention by it, and transformers' hook for targets.

Shapes: B rows, N query heads, K key/value heads, S queries, T keys, D head width; T >= S, and the last query stands at
the last key.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton
from transformers import AttentionInterface

from longspec.models.attention import flash, flex, sdpa, text_part, tree
from longspec.models.attention.visibility import TreeVisibility, Visibility

_log = logging.getLogger(__name__)

AUTO, FLASH, FLEX, SDPA = "auto", "flash_attention_2", "flex_attention", "sdpa"
BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]] = {
    FLASH: flash.attend,
    FLEX: flex.attend,
    SDPA: sdpa.attend,
}
# Output and log-sum-exp of a text, or of its last tokens, over itself.
PARTS = {FLASH: flash.attend_text, FLEX: flex.attend_text, SDPA: text_part.attend_blocks}
TREE_BACKENDS: dict[str, tree.Backend] = {FLASH: tree.attend_flash, FLEX: flex.attend_tree, SDPA: tree.attend_fused}


def attend(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: Visibility | TreeVisibility, scale: float, backend: str = AUTO
) -> Tensor:
    """Attention output [B, N, S, D], the same in every backend to the dtype's tolerance; zeros for a query that sees no key."""
    if isinstance(visibility, TreeVisibility):
        if backend == AUTO:
            # One kernel serves trees of all lengths, so that compiling it pays in decoding too; float64 it does not take.
            backend = fastest(q_BNSD.device.type, q_BNSD.dtype, q_BNSD.shape[-1], q_BNSD.dtype != torch.float64)
        return tree.attend(q_BNSD, k_BKTD, v_BKTD, visibility, scale, TREE_BACKENDS[backend])
    if backend == AUTO:
        training = flex.needs_gradient(q_BNSD, k_BKTD, v_BKTD)
        backend = fastest(q_BNSD.device.type, q_BNSD.dtype, q_BNSD.shape[-1], training)
    return BACKENDS[backend](q_BNSD, k_BKTD, v_BKTD, visibility, scale)


def attend_with_sinks(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    sinks_N: Tensor,
    visibility: Visibility | TreeVisibility,
    scale: float,
    backend: str = AUTO,
) -> Tensor:
    """As attend, with a sink for each query head in its softmax; of a target, so that no gradient is wanted.

    A tree's scores are made on every backend: there is one mask of nodes by keys, and no kernel for GPUs takes it and tells its
    log-sum-exp.
    """
    if isinstance(visibility, TreeVisibility):
        return text_part.weaken(text_part.attend_masked_tree(q_BNSD, k_BKTD, v_BKTD, visibility, scale), sinks_N)
    if backend == AUTO:
        backend = fastest(q_BNSD.device.type, q_BNSD.dtype, q_BNSD.shape[-1], False)
    return text_part.weaken(PARTS[backend](q_BNSD, k_BKTD, v_BKTD, visibility, scale), sinks_N)


def check_backend(name: str) -> None:
    """Raise ValueError, with the fix, for a backend that is unknown or not installed."""
    if name not in (AUTO, *BACKENDS):
        raise ValueError(f"runtime.attention: {name!r} is unknown; choose one of {', '.join([AUTO, *BACKENDS])}")
    if name == FLASH:
        flash.package()


def choose(wanted: str, device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """The backend that training takes where `wanted` is asked for.

    Raises ValueError, with the fix, for one that is unknown, not installed, or cannot train on this device in this dtype.
    """
    check_backend(wanted)
    if wanted == AUTO:
        return fastest(device.type, dtype, head_width, True)
    if wanted == FLASH:
        if device.type != "cuda":
            raise ValueError(
                f"runtime.attention: flash_attention_2 runs on CUDA GPUs, this is a {device.type}: set auto or sdpa"
            )
        if dtype not in flash.DTYPES:
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
    """Why flex_attention cannot be compiled for a GPU here; empty when it can."""
    if not has_triton():
        return "triton is not installed, so it cannot be compiled"
    if head_width < flex.LEAST_HEAD_WIDTH:
        return f"heads of width {head_width} are below the {flex.LEAST_HEAD_WIDTH} that its kernels take"
    return ""


@cache
def fastest(device: str, dtype: torch.dtype, head_width: int, training: bool) -> str:
    """The fastest backend that is there, logged once for each kind of call.

    Outside of training, as in decoding, lengths change from call to call, and flex_attention would compile for each.
    """
    if device != "cuda":
        backend, why = SDPA, f"the fastest on a {device}"
    elif dtype in flash.DTYPES and flash.is_installed():
        backend, why = FLASH, "installed, and takes this dtype"
    elif training and not (compiled := _not_compiled(head_width)):
        backend, why = FLEX, f"flash-attn is not installed ({flash.INSTALL}) or does not take {dtype}"
    else:
        backend, why = SDPA, f"flex_attention: {compiled}" if training else "for lengths that change"
    _log.info("attention: auto is %s (%s)", backend, why)
    return backend


# Arguments that layers pass to their attention though they are used before it, or elsewhere.
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
    """transformers' attention hook, [B, S, N, D]. Documents come in by `visibility` and are never guessed from positions.

    One `visibility` given to the target's forward serves all its layers; `sliding_window` is the layer's own and counts the
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
    if s_aux is None:
        return attend(q_BNSD, k_BKTD, v_BKTD, seen, scaling, attention_backend).transpose(1, 2), None
    seen_BNSD = attend_with_sinks(q_BNSD, k_BKTD, v_BKTD, s_aux, seen, scaling, attention_backend)
    return seen_BNSD.transpose(1, 2), None


# Without a mask function of the same name transformers makes no mask, and does not guess packing from the positions.
TARGET_ATTENTION = "longspec"
AttentionInterface.register(TARGET_ATTENTION, target_attention)
