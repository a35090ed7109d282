"""Attend for chains unrolled from every token of a text at once (EAGLE-3's training-time test, section 3.2).

In step i, query t belongs to the chain that starts at t. It sees the text's keys up to t, as a Visibility says, and the chain's
own keys t of steps 1 to i. A kernel computes the text's part; the few own keys are dot products. Their weights are the sums of
exponentials, whose logarithms both give.

Shapes: B rows, N query heads, K key/value heads, G = N / K, S chains, J own keys of a chain, D head width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from longspec.models.attention import flash, flex, sdpa
from longspec.models.attention.backends import FLASH, FLEX, SDPA
from longspec.models.attention.visibility import Visibility, dense

KeysValues = tuple[Tensor, Tensor]  # keys after RoPE and values, [B, K, S, D] each
# Number of query elements merged with own keys at a time: on a CPU what fits its caches, on a GPU what keeps it busy.
BLOCK = {"cpu": 2**17, "cuda": 2**25}


class _Attend(torch.autograd.Function):
    """Attend over text and own keys as one function, so that nothing of the text's part alone is kept."""

    @staticmethod
    def forward(ctx: Any, visibility: Visibility, scale: float, kernels: Any, *everything: Tensor) -> Tensor:
        q_BNSD, k_BKSD, v_BKSD, *own = everything
        seen_BNSD, lse_BNS = kernels[0](q_BNSD, k_BKSD, v_BKSD, visibility, scale)
        weights_JBNS = None
        if own:
            lse_BNS, weights_JBNS, _ = _merge(seen_BNSD, lse_BNS, q_BNSD, own, scale, seen_BNSD)
        ctx.visibility, ctx.scale, ctx.gradients = visibility, scale, kernels[1]
        ctx.save_for_backward(seen_BNSD, lse_BNS, weights_JBNS, *everything)
        return seen_BNSD

    @staticmethod
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        """Use the kernel's backward for the text's keys, given output and log-sum-exp over all keys."""
        seen_BNSD, lse_BNS, weights_JBNS, q_BNSD, k_BKSD, v_BKSD, *own = ctx.saved_tensors
        grad_BNSD = dense(grad_BNSD)
        of_text = ctx.gradients(grad_BNSD, q_BNSD, k_BKSD, v_BKSD, (seen_BNSD, lse_BNS), ctx.visibility, ctx.scale)
        of_own = _own_gradients(grad_BNSD, seen_BNSD, weights_JBNS, q_BNSD, own, ctx.scale, of_text[0]) if own else ()
        return None, None, None, *of_text, *of_own


class _Merge(torch.autograd.Function):
    """Merge own keys into the text's part, which has its own backward for output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, part_BNSD: Tensor, part_lse_BNS: Tensor, scale: float, q_BNSD: Tensor, *own: Tensor) -> Tensor:
        seen_BNSD = torch.empty_like(part_BNSD)
        _, weights_JBNS, share_BNS = _merge(part_BNSD, part_lse_BNS, q_BNSD, list(own), scale, seen_BNSD)
        ctx.scale = scale
        ctx.save_for_backward(part_BNSD, seen_BNSD, share_BNS, weights_JBNS, q_BNSD, *own)
        return seen_BNSD

    @staticmethod
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients. With w the part's share: w dO for its output, and w dO (part - O) for its log-sum-exp."""
        part_BNSD, seen_BNSD, share_BNS, weights_JBNS, q_BNSD, *own = ctx.saved_tensors
        of_q_BNSD = torch.zeros_like(q_BNSD)
        of_own = _own_gradients(grad_BNSD, seen_BNSD, weights_JBNS, q_BNSD, own, ctx.scale, of_q_BNSD)
        of_part_BNSD, of_lse_BNS = torch.empty_like(part_BNSD), torch.empty_like(share_BNS)
        for span in _blocks(q_BNSD):
            grad, seen, part = (x[:, :, span].to(share_BNS.dtype) for x in (grad_BNSD, seen_BNSD, part_BNSD))
            weighted = grad * share_BNS[:, :, span, None]
            of_part_BNSD[:, :, span] = weighted
            of_lse_BNS[:, :, span] = weighted.mul_(part - seen).sum(-1)
        return of_part_BNSD, of_lse_BNS, None, of_q_BNSD, *of_own


def _merge(
    part_BNSD: Tensor, part_lse_BNS: Tensor, q_BNSD: Tensor, own: list[Tensor], scale: float, seen_BNSD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the merged output to `seen_BNSD`, which may be the part's own tensor.

    Return the log-sum-exp over all keys [B, N, S], the weights of own keys [J, B, N, S] and the part's weight [B, N, S].
    Queries that see no text are padding: their log-sum-exp is plus infinity, so that every weight is 0, here and in kernels.
    """
    keys, values = own[::2], own[1::2]
    lse_BNS, share_BNS = torch.empty_like(part_lse_BNS), torch.empty_like(part_lse_BNS)
    weights_JBNS = lse_BNS.new_empty(len(keys), *lse_BNS.shape)
    heads = own[0].shape[1]
    for span in _blocks(q_BNSD):
        q, part = (_grouped(x[:, :, span], heads, lse_BNS.dtype) for x in (q_BNSD, part_BNSD))
        part_lse = part_lse_BNS[:, :, span].unflatten(1, (heads, -1))
        scores = torch.stack([*((q * k[:, :, None, span]).sum(-1).mul_(scale) for k in keys), part_lse])
        lse = scores.logsumexp(0).masked_fill_(part_lse == -torch.inf, torch.inf)
        weights = scores.sub_(lse).exp_()
        merged = part * weights[-1, ..., None]
        for weight, v in zip(weights[:-1], values, strict=True):
            merged.addcmul_(weight[..., None], v[:, :, None, span].to(merged.dtype))
        seen_BNSD[:, :, span] = merged.flatten(1, 2)
        lse_BNS[:, :, span] = lse.flatten(1, 2)
        weights_JBNS[:, :, :, span] = weights[:-1].flatten(2, 3)
        share_BNS[:, :, span] = weights[-1].flatten(1, 2)
    return lse_BNS, weights_JBNS, share_BNS


def _own_gradients(
    grad_BNSD: Tensor,
    seen_BNSD: Tensor,
    weights_JBNS: Tensor,
    q_BNSD: Tensor,
    own: list[Tensor],
    scale: float,
    of_q_BNSD: Tensor,
) -> list[Tensor]:
    """Return gradients of own keys and values; add their part of the queries' gradient to `of_q_BNSD`.

    dv = p dO, ds = p (dO v - dO O), dq = scale ds k, dk = scale ds q, with p the key's weight; summed over a head's group.
    """
    keys, values = own[::2], own[1::2]
    gradients = [torch.empty_like(x) for x in own]
    heads = own[0].shape[1]
    for span in _blocks(q_BNSD):
        grad, seen, q = (_grouped(x[:, :, span], heads, weights_JBNS.dtype) for x in (grad_BNSD, seen_BNSD, q_BNSD))
        weights = weights_JBNS[:, :, :, span].unflatten(2, (heads, -1))
        dot = (grad * seen).sum(-1)
        of_q = torch.zeros_like(q)
        for step, (k, v) in enumerate(zip(keys, values, strict=True)):
            of_score = ((grad * v[:, :, None, span]).sum(-1) - dot).mul_(weights[step]).mul_(scale)[..., None]
            of_q.addcmul_(of_score, k[:, :, None, span].to(of_q.dtype))
            gradients[2 * step][:, :, span] = _summed(of_score * q)
            gradients[2 * step + 1][:, :, span] = _summed(weights[step, ..., None] * grad)
        of_q_BNSD[:, :, span] += of_q.flatten(1, 2)
    return gradients


def _summed(x_BKGSD: Tensor) -> Tensor:
    """Return the sum over a key's group of heads."""
    return x_BKGSD[:, :, 0] if x_BKGSD.shape[2] == 1 else x_BKGSD.sum(2)


def _grouped(x_BNSD: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    return x_BNSD.unflatten(1, (heads, -1)).to(dtype)


def _blocks(q_BNSD: Tensor) -> Iterator[slice]:
    """Return spans of chains that are computed at once."""
    rows, heads, length, width = q_BNSD.shape
    step = max(1, BLOCK.get(q_BNSD.device.type, 2**25) // (rows * heads * width))
    return (slice(start, start + step) for start in range(0, length, step))


def by_kernels(kernels: Any, visibility: Any, scale: float, *everything: Tensor) -> Tensor:
    """Attend with kernels that return the text part's log-sum-exp, and whose backward accepts another one."""
    return _Attend.apply(visibility, scale, kernels, *everything)


def by_flash(visibility: Visibility, scale: float, *everything: Tensor) -> Tensor:
    """Attend with flash-attn, which hides one key more per query; it cannot hide blocks, so lag_blocks uses torch's kernels."""
    if visibility.lag_blocks is not None:
        return by_sdpa(visibility, scale, *everything)
    return by_kernels((flash.attend_text, flash.text_gradients), visibility, scale, *everything)


def by_sdpa(visibility: Visibility, scale: float, *everything: Tensor) -> Tensor:
    """Attend with torch's own kernels; if chains have no own keys, as whole attention."""
    if len(everything) == 3:
        return sdpa.attend(*everything, visibility, scale)
    return by_kernels((sdpa.attend_text, sdpa.text_gradients), visibility, scale, *everything)


def by_flex(visibility: Visibility, scale: float, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *own: Tensor) -> Tensor:
    """Attend with flex_attention, whose own backward takes gradients of output and log-sum-exp."""
    if not own:
        return flex.attend(flex.text_mask(visibility, q_BNSD, k_BKSD), q_BNSD, k_BKSD, v_BKSD, scale, with_lse=False)[0]
    return _Merge.apply(*flex.attend_text(q_BNSD, k_BKSD, v_BKSD, visibility, scale), scale, q_BNSD, *own)


WAYS: dict[str, Callable[..., Tensor]] = {FLASH: by_flash, FLEX: by_flex, SDPA: by_sdpa}
