"""Soft cross entropy of a chain's steps over a part of the target's vocabulary, with a head that is trained; in chunks.

The target's distribution after a token is made once and serves all steps that predict the token after it. Gradients are taken
in the forward, where a chunk's logits exist: no [tokens, vocabulary] tensor is kept.

Shapes: N tokens, C tokens of a chunk, K steps, M rows of one step, R rows of a chunk, one step after another, H hidden width,
T target's vocabulary, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.config.schema import SOFT
from longspec.models import losses
from longspec.models.acceptance_losses import acceptance_loss
from longspec.models.losses import SparseTeacher, draft_numbers


@dataclass(frozen=True)
class DenseLabels:
    """Labels of a chain's steps, of N tokens each.

    p_NV: the target's probabilities of the draft's tokens; best_N: the draft's number of the target's likeliest token, -1 where
    the draft cannot propose it; own_loss_N: the target's cross entropy with the next token.
    """

    p_NV: Tensor
    best_N: Tensor
    own_loss_N: Tensor

    def of(self, rows: Tensor) -> "DenseLabels":
        """Some of the tokens; no copy of the distributions where they are all."""
        p_MV = self.p_NV if len(rows) == len(self.p_NV) else self.p_NV[rows]
        return DenseLabels(p_MV, self.best_N[rows], self.own_loss_N[rows])

    def loss_and_gradient_(self, logits_MV: Tensor, kind: str = SOFT) -> Tensor:
        """-sum_v p(v) log q(v) of each row; the logits become its gradient with respect to them, q - p.

        kind: tv or lk is another loss (acceptance_losses.py).
        """
        normalizer_M1 = logits_MV.logsumexp(-1, keepdim=True)
        loss_M = normalizer_M1[:, 0] - (self.p_NV * logits_MV).sum(-1)
        logits_MV.sub_(normalizer_M1).exp_()
        if kind == SOFT:
            logits_MV.sub_(self.p_NV)
            return loss_M
        loss_M, gradient_MV = acceptance_loss(kind, self.p_NV, logits_MV, loss_M)
        logits_MV.copy_(gradient_MV)
        return loss_M


@dataclass(frozen=True)
class DenseTeacher:
    """The frozen target's side: hidden states and next tokens of N tokens, its head, and what a draft can propose of it."""

    hidden_NH: Tensor  # after the final norm
    weight_TH: Tensor
    labels_N: Tensor
    ids_V: Tensor | None  # the target's tokens that the draft's are, ascending; None: all of them
    with_loss: bool  # whether the target's own cross entropy is wanted
    best_N: Tensor | None = None  # the most likely tokens, where rounding may have moved what hidden_NH says of them

    def __len__(self) -> int:
        """The number N of tokens."""
        return len(self.labels_N)

    @property
    def target_vocabulary(self) -> int:
        """Logits that are made of each token on the target's side."""
        return len(self.weight_TH)

    def of(self, part: slice | Tensor) -> DenseLabels:
        """Some of the tokens: their logits are made."""
        teacher_CT = F.linear(self.hidden_NH[part], self.weight_TH)
        teacher_CT = teacher_CT.to(torch.promote_types(teacher_CT.dtype, torch.float32))
        best_C = teacher_CT.argmax(-1) if self.best_N is None else self.best_N[part].long()
        loss_C = torch.zeros_like(best_C, dtype=teacher_CT.dtype)
        if self.with_loss:
            loss_C = teacher_CT.logsumexp(-1) - teacher_CT.gather(-1, self.labels_N[part, None])[:, 0]
        p_CV = (teacher_CT if self.ids_V is None else teacher_CT[:, self.ids_V]).softmax(-1)
        return DenseLabels(p_CV, draft_numbers(best_C, self.ids_V), loss_C)


Teacher = DenseTeacher | SparseTeacher


class ChainSums(NamedTuple):  # engines look for tensors in tuples
    """Sums over rows; `draft` alone carries a gradient, to the rows' hidden states and the head's weight.

    draft: over all steps, each with its weight. The others by step [K], without weights: losses, of the rows that are inside;
    inside: rows whose token the target follows, most likely, by one that the draft can propose; agreements: rows whose most
    likely next token is the target's; target_K: the target's own cross entropy with the next token. target: the same over all
    N tokens. None where it is not wanted.
    """

    draft: Tensor
    losses_K: Tensor
    inside_K: Tensor
    agreements_K: Tensor
    target_K: Tensor | None
    target: Tensor | None


def cuts_of_chunks(places: Sequence[Tensor], tokens: int, chunk: int) -> list[list[slice]]:
    """For each chunk the rows of each step, of places int64 [M] ascending. One transfer from the device."""
    edges = torch.arange(0, tokens + chunk, chunk, device=places[0].device)
    cuts = torch.stack([torch.searchsorted(places_M, edges) for places_M in places]).tolist()
    return [[slice(cut[number], cut[number + 1]) for cut in cuts] for number in range(len(edges) - 1)]


# Gradients that the chunks add up: of each step's hidden states [M, H], and of the head's weight, in float32 or better.
_Gradients = tuple[list[Tensor], Tensor]


class _ChunkedChains(torch.autograd.Function):
    """Take the gradients chunk by chunk in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, teacher: Teacher, places: list[Tensor], weights: list[float], kind: str, weight_VH: Tensor, *hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted sum of all losses; the sums of each step without weights, [4, K]; the target's loss."""
        wide, device = torch.promote_types(weight_VH.dtype, torch.float32), weight_VH.device
        sums_4K = torch.zeros(4, len(places), dtype=wide, device=device)
        target = torch.zeros((), dtype=wide, device=device)
        gradients: _Gradients | None = None
        if any(hidden_MH.requires_grad for hidden_MH in hidden):
            gradients = [torch.empty_like(each) for each in hidden], torch.zeros_like(weight_VH, dtype=wide)
        # The logits of the target and of every step of the draft are made at once.
        chunk = losses.chunk_tokens(teacher.target_vocabulary + len(places) * len(weight_VH), device)
        for number, cuts in enumerate(cuts_of_chunks(places, len(teacher), chunk)):
            part = slice(number * chunk, (number + 1) * chunk)
            place = [each[rows] - part.start for each, rows in zip(places, cuts, strict=True)]
            labels = teacher.of(part)
            target += labels.own_loss_N.sum()
            chunk_RH = torch.cat([each[rows] for each, rows in zip(hidden, cuts, strict=True)])
            logits_RV = F.linear(chunk_RH, weight_VH).to(wide)
            for step, logits_MV in enumerate(logits_RV.split([len(place_M) for place_M in place])):
                sums_4K[:, step] += _take_step(labels.of(place[step]), logits_MV, weights[step], kind)
            if gradients is not None:
                _add_gradients(gradients, logits_RV.to(weight_VH.dtype), chunk_RH, weight_VH, cuts)
            del labels, logits_RV, logits_MV  # before the next chunk's are made
        ctx.dtype = weight_VH.dtype
        if gradients is not None:
            ctx.save_for_backward(gradients[1], *gradients[0])
        total = (sums_4K[0] * torch.tensor(weights, dtype=wide, device=device)).sum()
        ctx.mark_non_differentiable(sums_4K, target)
        return total, sums_4K, target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return both gradients, times the loss's own."""
        grad_VH, *hidden = ctx.saved_tensors
        # The scale stays in float32: rounded to bfloat16 it would move the whole gradient by up to 0.2 %.
        scaled_VH = torch.mul(grad_VH, grads[0], out=torch.empty_like(grad_VH, dtype=ctx.dtype))
        return None, None, None, None, scaled_VH, *(grad_MH * grads[0] for grad_MH in hidden)


def _take_step(labels: DenseLabels | SparseTeacher, logits_MV: Tensor, weight: float, kind: str) -> Tensor:
    """A step's part of the four sums; its logits become the weighted gradient with respect to them."""
    agrees_M, inside_M = logits_MV.argmax(-1) == labels.best_N, (labels.best_N >= 0).to(logits_MV.dtype)
    loss_M = labels.loss_and_gradient_(logits_MV, kind)
    logits_MV *= (weight * inside_M)[:, None]
    # A product and no choice: what is not a number stays it, and names its rows.
    return torch.stack([part_M.sum() for part_M in (loss_M * inside_M, inside_M, agrees_M, labels.own_loss_N)])


def _add_gradients(
    gradients: _Gradients, gradient_RV: Tensor, chunk_RH: Tensor, weight_VH: Tensor, cuts: Sequence[slice]
) -> None:
    """Write a chunk's gradients of hidden states, and add that of the weight."""
    (hidden, grad_VH), counts = gradients, [rows.stop - rows.start for rows in cuts]
    for grad_MH, rows, part in zip(hidden, cuts, (gradient_RV @ weight_VH).split(counts), strict=True):
        grad_MH[rows] = part
    if grad_VH.dtype == weight_VH.dtype:
        torch.addmm(grad_VH, gradient_RV.T, chunk_RH, out=grad_VH)
    else:
        grad_VH += gradient_RV.T @ chunk_RH


def chain_cross_entropy(
    weight_VH: Tensor, hidden: list[Tensor], teacher: Teacher, places: list[Tensor], weights: list[float], kind: str = SOFT
) -> ChainSums:
    """Sums of the losses of logits hidden @ weight_VH.T against the target's distribution over the draft vocabulary.

    teacher: the target's hidden states and head; or the k likeliest tokens of that distribution, with the rest as one more
    outcome (losses.py). Rows whose token the draft cannot propose have no loss. hidden: of each step [M, H]; places: of
    each step int64 [M], ascending, the tokens among the N whose next ones its rows predict; weights: of each step's loss.
    kind: soft, or tv or lk in its place (acceptance_losses.py).
    """
    draft, sums_4K, target = _ChunkedChains.apply(teacher, places, weights, kind, weight_VH, *hidden)
    losses_K, inside_K, agreements_K, target_K = sums_4K
    told = teacher.with_loss
    return ChainSums(draft, losses_K, inside_K, agreements_K, target_K if told else None, target if told else None)


def chain_bytes(
    target_vocabulary: int,
    vocabulary: int,
    steps: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sparse: bool = False,
) -> int:
    """Bytes of the logits that are alive at once while the losses of so many tokens are taken.

    The target's in float32 twice; or, over the draft vocabulary, its distribution, all steps' logits and three temporaries of a
    step, or all steps' logits in the head's dtype too. `sparse`: a sparse teacher has none on the target's side, and a step one
    temporary.
    """
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    if sparse:
        chunk = min(tokens, losses.chunk_tokens(steps * vocabulary, device))
        return chunk * vocabulary * (4 * steps + max(4, narrow * steps))
    chunk = min(tokens, losses.chunk_tokens(target_vocabulary + steps * vocabulary, device))
    of_target = (8 + narrow) * target_vocabulary
    return chunk * max(of_target, vocabulary * (4 + 4 * steps + max(12, narrow * steps)))
