"""Compute losses of linear logits against hard and soft labels, in chunks: no [tokens, vocabulary] tensor is kept.

Gradients are computed in the forward, where a chunk's logits exist. This module has the loss of a text; chain_losses.py and
block_losses.py those of chains and blocks; teachers.py the target's side.

Shapes: N tokens, C tokens of a chunk, M rows, R rows of a chunk, H hidden width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.config.schema import HARD, LK, SOFT, TV
from longspec.models.teachers import Labels, Teacher

NO_LABEL = -100  # label of tokens that are not trained
MIX = "mix"  # the mean of hard and soft
# Bytes of one chunk of float32 logits; about five are alive at once. On a CPU chunks up to 4 MiB are as fast as all logits at
# once or faster (benchmarks/loss_chunks.py). The GPU's number is calculated: 450 tokens of a vocabulary of 152k; with fewer,
# reading the head takes longer than multiplying by it.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Least tokens of a chunk on a CPU: with fewer, large vocabularies get up to 1.8 times slower.
LEAST_TOKENS = 128
# Indices of what a row adds to the sums of a loss, from `taken_`.
LOSS, INSIDE, AGREES, OWN, HITS = range(5)


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are made at once."""
    return max(LEAST_TOKENS, CHUNK_BYTES[device.type] // (4 * vocabulary))


def taken_(
    logits_MV: Tensor, labels: Labels | None, numbers_M: Tensor | None, kind: str, scale: float | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows' summed loss, each times its scale, and their parts of the sums [5, M]; logits become its gradient.

    scale None: all rows count fully; with a scale, rows whose token to learn the draft cannot propose have no loss.
    hard: -log q(label), labels numbers_M, -1: not proposable. soft: -sum_v p(v) log q(v) times temperature^2, both
    distributions at the temperature (Hinton et al. 2015, 2), if the target's likeliest token is proposable; a sparse teacher
    has k tokens and the rest. mix: the mean of the two. tv, lk: instead of soft.
    """
    best_M, zeros_M = logits_MV.argmax(-1), torch.zeros_like(logits_MV[:, 0])
    hits_M = zeros_M if numbers_M is None else (best_M == numbers_M).to(zeros_M)
    agrees_M, own_M = zeros_M, zeros_M
    if labels is not None:
        agrees_M, own_M = (best_M == labels.best_N).to(zeros_M), labels.own_loss_N.to(zeros_M)
    loss_M = _loss_and_gradient_(logits_MV, labels, numbers_M, kind)
    learnt_M = numbers_M if kind == HARD or labels is None else labels.best_N
    assert learnt_M is not None, "hard labels are tokens"
    if scale is None:
        return loss_M.sum(), torch.stack([loss_M, torch.ones_like(zeros_M), agrees_M, own_M, hits_M])
    # A product instead of a choice: NaN stays NaN, and names its rows.
    inside_M = (learnt_M >= 0).to(zeros_M)
    logits_MV *= (inside_M * scale)[:, None]
    loss_M = loss_M * inside_M
    return (loss_M * scale).sum(), torch.stack([loss_M, inside_M, agrees_M, own_M, hits_M])


def _loss_and_gradient_(logits_MV: Tensor, labels: Labels | None, numbers_M: Tensor | None, kind: str) -> Tensor:
    if kind == MIX:
        hard_MV = logits_MV.clone()
        parts = [_loss_and_gradient_(x, labels, numbers_M, each) for x, each in ((hard_MV, HARD), (logits_MV, SOFT))]
        logits_MV.add_(hard_MV).div_(2)
        return (parts[0] + parts[1]) / 2
    if kind == HARD:
        assert numbers_M is not None, "hard labels are tokens"
        rows_M, numbers_M = torch.arange(len(numbers_M), device=numbers_M.device), numbers_M.clamp_min(0)
        log_q_MV = logits_MV.log_softmax(-1)
        torch.exp(log_q_MV, out=logits_MV)
        logits_MV[rows_M, numbers_M] -= 1.0
        return -log_q_MV[rows_M, numbers_M]
    assert labels is not None, "soft labels need the target's distribution"
    if labels.temperature == 1:
        return labels.loss_and_gradient_(logits_MV, kind)
    loss_M = labels.loss_and_gradient_(logits_MV.div_(labels.temperature), kind) * labels.temperature**2
    logits_MV.mul_(labels.temperature)
    return loss_M


# A chunk's rows of each tensor of hidden states; and a function that turns their logits into its gradient and returns the loss.
Chunk = tuple[list[slice], Callable[[Tensor], Tensor]]


def chunked(weight_VH: Tensor, hidden: list[Tensor], chunks: Iterable[Chunk]) -> Tensor:
    """Return the summed loss of logits hidden @ weight_VH.T, with gradients of weight_VH and hidden if they require one."""
    return _Chunked.apply(chunks, torch.is_grad_enabled(), weight_VH, *hidden)


class _Chunked(torch.autograd.Function):
    """Compute the gradients chunk by chunk in the forward; the backward scales them."""

    @staticmethod
    def forward(ctx: Any, chunks: Iterable[Chunk], trains: bool, weight_VH: Tensor, *hidden: Tensor) -> Tensor:
        """Return the sum over the chunks."""
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        total = weight_VH.new_zeros((), dtype=wide)
        of_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if trains and weight_VH.requires_grad else None
        of_hidden = [torch.zeros_like(x) if trains and x.requires_grad else None for x in hidden]
        for cuts, take_ in chunks:
            parts = [x[rows] for x, rows in zip(hidden, cuts, strict=True)]
            chunk_RH = parts[0] if len(parts) == 1 else torch.cat(parts)
            logits_RV = F.linear(chunk_RH, weight_VH).to(wide)
            total += take_(logits_RV)
            gradient_RV = logits_RV.to(weight_VH.dtype)
            if any(x is not None for x in of_hidden):
                of_parts = (gradient_RV @ weight_VH).split([len(part) for part in parts])
                for of_MH, rows, of_part in zip(of_hidden, cuts, of_parts, strict=True):
                    if of_MH is not None:
                        of_MH[rows] = of_part
            if of_weight_VH is not None and of_weight_VH.dtype == weight_VH.dtype:
                torch.addmm(of_weight_VH, gradient_RV.T, chunk_RH, out=of_weight_VH)
            elif of_weight_VH is not None:
                of_weight_VH += gradient_RV.T @ chunk_RH
            del take_, logits_RV, gradient_RV  # before the next chunk's are made
        ctx.dtypes = [x.dtype for x in (weight_VH, *hidden)]
        ctx.save_for_backward(of_weight_VH, *of_hidden)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, times the gradient of the loss."""
        # The scale stays in float32: rounded to bfloat16 it would move the whole gradient by up to 0.2 %.
        return (
            None,
            None,
            *(
                None if x is None else torch.mul(x, grads[0], out=torch.empty_like(x, dtype=dtype))
                for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ),
        )


class StepSums(NamedTuple):  # engines look for tensors in tuples
    """Hold sums over the labels of a chain's steps, or a block's slots; only `draft` carries a gradient.

    draft: the weighted loss of all. The others are unweighted, by step [K]. reached: all labels; inside: those whose token
    to learn the draft can propose; losses: of these; agreements: labels at which draft and target prefer the same token;
    target_K: the target's own cross entropy with the text's token. target: of a chain, the same over all tokens; leading_hits:
    in all blocks, tokens equal to the text's, up to each block's first other one. None: not wanted or not known.
    """

    draft: Tensor
    losses_K: Tensor
    inside_K: Tensor
    reached_K: Tensor
    agreements_K: Tensor | None
    target_K: Tensor | None
    target: Tensor | None = None
    leading_hits: Tensor | None = None


def linear_cross_entropy(
    hidden_NH: Tensor, teacher: Teacher | None, weight_VH: Tensor, labels_N: Tensor, kind: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the summed loss of the logits hidden_NH @ weight_VH.T on tokens that are all trained, with the draft's gradient.

    Also return the target's own cross entropy with the next token, and the number of tokens where draft and target prefer the
    same one; both None without a teacher, which only hard labels allow. weight_VH, the frozen head, gets no gradient.
    """
    chunk, wide = chunk_tokens(len(weight_VH), hidden_NH.device), torch.promote_types(weight_VH.dtype, torch.float32)
    sums_5 = torch.zeros(5, dtype=wide, device=hidden_NH.device)

    def take_(part: slice, labels: Labels | None, logits_CV: Tensor) -> Tensor:
        loss, of_rows = taken_(logits_CV, labels, labels_N[part], kind)
        sums_5.add_(of_rows.sum(1))
        return loss

    def chunks() -> Iterator[Chunk]:
        for start in range(0, len(labels_N), chunk):
            part = slice(start, start + chunk)
            yield [part], partial(take_, part, None if teacher is None else teacher.of(part))

    draft = chunked(weight_VH, [hidden_NH], chunks())
    return (draft, None, None) if teacher is None else (draft, sums_5[OWN], sums_5[AGREES])


# Float32 chunks [tokens, V] alive at once: the target's distribution, the logits, their logarithms, a product, a dtype's copy.
LOGITS_ALIVE = 5
MORE_ALIVE = {MIX: 1, TV: 3, LK: 3}  # mix copies the logits; acceptance_loss makes more of the two distributions
SPARSE_ALIVE = 3  # with a sparse teacher: the draft's logits, the gradient and a temporary


def loss_bytes(vocabulary: int, tokens: int, device: torch.device, *, sparse: bool = False, kind: str = SOFT) -> int:
    """Return the bytes of logits that are alive at once in the loss of so many tokens. sparse: with a sparse teacher."""
    alive = SPARSE_ALIVE if sparse else LOGITS_ALIVE + MORE_ALIVE.get(kind, 0)
    return min(tokens, chunk_tokens(vocabulary, device)) * vocabulary * 4 * alive
