"""Cross entropy of linear logits against hard and soft labels, in chunks: no [tokens, vocabulary] tensor is kept.

Soft labels are the target's whole distribution, or its k likeliest tokens, where these alone are stored. With p the target's
distribution over V tokens, K its k likeliest, q the draft's, r(p) = 1 - sum_{v in K} p(v):

    loss     = - sum_{v in K} p(v) log q(v) - r(p) log r(q)
    gradient = q(v) - p(v)                    in K, with respect to the draft's logit of v
               q(v) - r(p) q(v) / r(q)        outside

The tokens outside K are one outcome. So the loss, less the entropy of p's k + 1 outcomes, is a Kullback-Leibler divergence:
never negative, 0 where q gives each of K, and all the others together, what p gives them, and never above that of all V tokens
(merging outcomes loses information). How q shares the rest among its tokens is not taught. With k = V it is the cross entropy
of the whole distribution.

Shapes: N tokens, C tokens of a chunk, H hidden width, T target's vocabulary, V the tokens that the distributions are over.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.config.schema import HARD, LK, SOFT, TV
from longspec.models.acceptance_losses import acceptance_loss

NO_LABEL = -100  # of tokens that are not trained
# Of one chunk of float32 logits, of which about five are alive at once. On a CPU up to 4 MiB are as quick as all logits at once
# or quicker (benchmarks/loss_chunks.py). A GPU's is reckoned: 450 tokens of a vocabulary of 152k, below which reading the head
# takes longer than multiplying by it.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Least tokens of a chunk on a CPU: with fewer, large vocabularies get up to 1.8 times slower.
LEAST_TOKENS = 128
# Of one of the k tokens: its number in int32, and its log-probability in float16, whose rounding moves a distribution 15 to 33
# times less than bfloat16's (nats of divergence, k = 64 and 256, benchmarks/top_k_labels.py): no such number leaves its range.
TOP_BYTES = 6


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits are made at once."""
    return max(LEAST_TOKENS, CHUNK_BYTES[device.type] // (4 * vocabulary))


def draft_numbers(tokens: Tensor, ids_V: Tensor | None) -> Tensor:
    """The draft's numbers of the target's tokens, -1 where it cannot propose one; integers of any kind, which they stay.

    ids_V: the draft vocabulary, ascending; None: all tokens.
    """
    if ids_V is None:
        return tokens
    ids_V = ids_V.to(tokens.dtype)
    numbers = torch.searchsorted(ids_V, tokens, out_int32=tokens.dtype == torch.int32).clamp_(max=len(ids_V) - 1)
    return torch.where(ids_V[numbers] == tokens, numbers, -1)


@dataclass(frozen=True)
class SparseTeacher:
    """The target's side of a loss, without its hidden states and its head. Tokens are in the draft's own numbers.

    tokens_Nk: int32 or int64, each once; log_probs_Nk: any floating dtype, at the loss's temperature. best_N: the target's most
    likely token, -1: the draft cannot propose it, the row has no loss where the draft has a vocabulary of its own.
    next_log_prob_N: of the next tokens; None: the target's own loss is not wanted.
    """

    tokens_Nk: Tensor
    log_probs_Nk: Tensor
    best_N: Tensor
    next_log_prob_N: Tensor | None

    def __len__(self) -> int:
        """The number N of tokens."""
        return len(self.tokens_Nk)

    @property
    def target_vocabulary(self) -> int:
        """Logits that are made of each token on the target's side: none."""
        return 0

    @property
    def with_loss(self) -> bool:
        """Whether the target's own cross entropy is wanted."""
        return self.next_log_prob_N is not None

    def of(self, rows: slice | Tensor) -> "SparseTeacher":
        """Some of the tokens."""
        next_log_prob = None if self.next_log_prob_N is None else self.next_log_prob_N[rows]
        return SparseTeacher(self.tokens_Nk[rows], self.log_probs_Nk[rows], self.best_N[rows], next_log_prob)

    @property
    def own_loss_N(self) -> Tensor:
        """The target's own cross entropy with the next token; 0 where it is not wanted."""
        told_N = self.next_log_prob_N
        return torch.zeros_like(self.best_N, dtype=torch.float32) if told_N is None else -told_N.float()

    def loss_and_gradient_(self, logits_NV: Tensor, kind: str = SOFT) -> Tensor:
        """The loss [N] of the draft's logits, float32 or wider, which become its gradient with respect to them.

        kind: soft, the cross entropy; tv or lk (acceptance_losses.py).
        """
        tokens_Nk = self.tokens_Nk.long()
        p_Nk, rest_N1 = self._distribution(logits_NV.dtype, tokens_Nk.shape[1] < logits_NV.shape[1])
        top_Nk = logits_NV.gather(-1, tokens_Nk)
        logits_NV.scatter_(-1, tokens_Nk, -torch.inf)
        # All in logarithms, so that a rest which the draft holds for impossible has a loss and a gradient. Where there are no
        # other tokens the least number stands for -inf, so that nothing becomes 0 times infinity.
        least = torch.finfo(logits_NV.dtype).min
        highest_N1 = logits_NV.amax(-1, keepdim=True).clamp_(min=least)
        # One exponential serves the sum and the gradient; the highest one is 1, so that the sum is 0 or at least 1.
        sum_N1 = logits_NV.sub_(highest_N1).exp_().sum(-1, keepdim=True)
        outside_N1 = (highest_N1 + sum_N1.log()).clamp_(min=least)
        normalizer_N1 = torch.logaddexp(outside_N1, top_Nk.logsumexp(-1, keepdim=True))
        loss_N = (normalizer_N1 - rest_N1 * outside_N1)[:, 0] - (p_Nk * top_Nk).sum(-1)
        q_Nk, q_rest_N1 = (top_Nk - normalizer_N1).exp_(), (outside_N1 - normalizer_N1).exp_()
        if kind == SOFT:
            of_top_Nk, of_rest_N1 = q_Nk - p_Nk, q_rest_N1 - rest_N1
        else:
            outcomes = torch.cat([p_Nk, rest_N1], dim=-1), torch.cat([q_Nk, q_rest_N1], dim=-1)
            loss_N, gradient_NO = acceptance_loss(kind, *outcomes, loss_N)
            of_top_Nk, of_rest_N1 = gradient_NO[:, :-1], gradient_NO[:, -1:]
        logits_NV.mul_(of_rest_N1 / sum_N1.clamp_(min=1))
        logits_NV.scatter_(-1, tokens_Nk, of_top_Nk)
        return loss_N

    def own_loss(self) -> Tensor:
        return self.own_loss_N.sum()

    def soft_loss(self, logits_NV: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor]:
        """The summed loss of logits / temperature, and its gradient with respect to these; `logits_NV` stays as it is."""
        gradient_NV = logits_NV / temperature
        return self.loss_and_gradient_(gradient_NV, kind).sum(), gradient_NV

    def _distribution(self, dtype: torch.dtype, has_rest: bool) -> tuple[Tensor, Tensor]:
        """p of the k tokens and of the rest, which add up to 1: rounding in storage may have brought the k above it."""
        p_Nk = self.log_probs_Nk.to(dtype).exp()
        sum_N1 = p_Nk.sum(-1, keepdim=True)
        if not has_rest:
            return p_Nk / sum_N1, torch.zeros_like(sum_N1)
        return p_Nk / sum_N1.clamp(min=1), (1 - sum_N1).clamp(min=0)


@dataclass
class LossSums:
    """Sums over the trained tokens; `draft` alone carries a gradient, to the draft's hidden states."""

    draft: Tensor
    target: Tensor | None  # the target's own cross entropy with the next token
    agreements: Tensor | None  # tokens whose most likely next token is the same for draft and target


# Float32 chunks [tokens, V] at once: two models' logits, a softmax, the gradient, a temporary; two of the chunk before.
LOGITS_ALIVE, LOGITS_BEFORE = 5, 2
OF_ACCEPTANCE = 3  # more of them, for what acceptance_loss makes of two distributions
# A sparse teacher's: the draft's logits, both gradients and a temporary, of which soft labels alone need half.
SPARSE_ALIVE, SPARSE_BEFORE = 4, 1


def loss_bytes(vocabulary: int, tokens: int, device: torch.device, *, sparse: bool = False, kind: str = SOFT) -> int:
    """Bytes of the logits that are alive at once while the loss of so many tokens is taken; `sparse`: of a sparse teacher's."""
    chunk = chunk_tokens(vocabulary, device)
    alive, before = (SPARSE_ALIVE, SPARSE_BEFORE) if sparse else (LOGITS_ALIVE, LOGITS_BEFORE)
    more = OF_ACCEPTANCE if kind in (TV, LK) and not sparse else 0
    return min(tokens, chunk) * vocabulary * 4 * (alive + more + (before if tokens > chunk else 0))


@dataclass(frozen=True)
class _DenseLabels:
    """Labels made of the target's full logits [C, V], with the face of a SparseTeacher."""

    teacher_CV: Tensor
    next_C: Tensor

    @property
    def best_N(self) -> Tensor:
        return self.teacher_CV.argmax(-1)

    def own_loss(self) -> Tensor:
        return F.cross_entropy(self.teacher_CV, self.next_C, reduction="sum")

    def soft_loss(self, logits_CV: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor]:
        """Summed -sum_v p(v) log q(v), both at the temperature, or another kind of loss of these, and its gradient with respect
        to logits / temperature.
        """
        at_one = temperature == 1  # spares two copies of the chunk
        p_CV = (self.teacher_CV if at_one else self.teacher_CV / temperature).softmax(-1)
        log_q_CV = (logits_CV if at_one else logits_CV / temperature).log_softmax(-1)
        if kind != SOFT:
            entropy_C = -(p_CV * log_q_CV).sum(-1)
            loss_C, gradient_CV = acceptance_loss(kind, p_CV, log_q_CV.exp_(), entropy_C)
            return loss_C.sum(), gradient_CV
        loss = -torch.dot(p_CV.flatten(), log_q_CV.flatten())
        return loss, log_q_CV.exp_().sub_(p_CV)


_Labels = _DenseLabels | SparseTeacher


def _chunks(
    teacher: Tensor | SparseTeacher | None, weight_VH: Tensor, next_N: Tensor
) -> Iterator[tuple[slice, _Labels | None]]:
    """Spans of the tokens, and their labels; the teacher's hidden states become logits."""
    chunk = chunk_tokens(weight_VH.shape[0], next_N.device)
    for start in range(0, len(next_N), chunk):
        part = slice(start, start + chunk)
        if teacher is None or isinstance(teacher, SparseTeacher):
            yield part, None if teacher is None else teacher.of(part)
        else:
            yield part, _DenseLabels(F.linear(teacher[part], weight_VH).float(), next_N[part])


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is taken chunk by chunk in the forward pass, where the chunk's logits exist anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        teacher: Tensor | SparseTeacher | None,
        weight_VH: Tensor,
        labels_N: Tensor,
        kind: str,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = torch.zeros(3, dtype=torch.float32, device=hidden_NH.device)
        grad_NH = torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None
        for part, target in _chunks(teacher, weight_VH, labels_N):
            logits_CV = F.linear(hidden_NH[part], weight_VH).float()
            loss, grad_CV = _loss_and_gradient(logits_CV, target, labels_N[part], kind, temperature)
            sums[0] += loss
            if target is not None:
                sums[1] += target.own_loss()
                sums[2] += (target.best_N == logits_CV.argmax(-1)).sum()
            if grad_NH is not None:
                grad_NH[part] = grad_CV.to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(grad_NH)
        return sums[0], sums[1], sums[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NH,) = ctx.saved_tensors
        # The scale stays in float32: rounded to bfloat16 it would move the whole gradient by up to 0.2 %.
        return grad_NH * grads[0], None, None, None, None, None


def _loss_and_gradient(
    logits_CV: Tensor, target: _Labels | None, labels_C: Tensor, kind: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk and its gradient with respect to the logits.

    hard: -log q(label). soft: -sum_v p(v) log q(v) times temperature^2, both distributions at `temperature`
    (Hinton et al. 2015, 2); of a sparse teacher's k tokens and the rest. mix: the mean of the two. tv, lk: in place of soft.
    """
    hard, soft = {HARD: (1.0, 0.0), SOFT: (0.0, 1.0), "mix": (0.5, 0.5), TV: (0.0, 1.0), LK: (0.0, 1.0)}[kind]
    loss, gradient_CV = torch.zeros((), device=logits_CV.device), torch.zeros(())
    if soft:
        assert target is not None, "soft labels need the target's distribution"
        unscaled, gradient_CV = target.soft_loss(logits_CV, temperature, SOFT if kind == "mix" else kind)
        loss = loss + soft * temperature**2 * unscaled
        gradient_CV.mul_(soft * temperature)
    if hard:
        log_q_CV = logits_CV.log_softmax(-1)
        loss = loss + hard * F.nll_loss(log_q_CV, labels_C, reduction="sum")
        hard_CV = log_q_CV.exp_()
        hard_CV[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1.0
        gradient_CV = gradient_CV.to(hard_CV) + hard_CV.mul_(hard)
    return loss, gradient_CV


@cache
def fused_loss(device_type: str) -> Any:
    """Liger's fused linear cross entropy, where it runs: on a GPU, when liger-kernel is installed; else None."""
    if device_type != "cuda" or find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum", return_predicted_tokens=True)


@torch.no_grad()
def _target_sums(
    teacher: Tensor | SparseTeacher, weight_VH: Tensor, labels_N: Tensor, predicted_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's summed cross entropy and how often its most likely token is the predicted one."""
    sums = torch.zeros(2, device=labels_N.device)
    for part, target in _chunks(teacher, weight_VH, labels_N):
        assert target is not None, "there is a teacher"
        sums[0] += target.own_loss()
        sums[1] += (target.best_N == predicted_N[part]).sum()
    return sums[0], sums[1]


def linear_cross_entropy(
    hidden_NH: Tensor,
    teacher: Tensor | SparseTeacher | None,
    weight_VH: Tensor,
    labels_N: Tensor,
    kind: str,
    temperature: float = 1.0,
) -> LossSums:
    """Summed loss of the logits hidden_NH @ weight_VH.T on tokens that are all trained.

    teacher: the target's hidden states [N, H] after its final norm, or the k likeliest tokens of its distributions at
    `temperature`; None only for hard labels. weight_VH is the frozen head and gets no gradient; labels_N int64. Hard labels go
    through Liger's kernel where it runs.
    """
    fused = fused_loss(hidden_NH.device.type)
    if kind == HARD and fused is not None and len(labels_N):
        found = fused(weight_VH, hidden_NH, labels_N)
        sums = (None, None) if teacher is None else _target_sums(teacher, weight_VH, labels_N, found.predicted_tokens)
        return LossSums(found.loss.float(), *sums)
    draft, target, agreements = _ChunkedLoss.apply(hidden_NH, teacher, weight_VH, labels_N, kind, temperature)
    if teacher is None:
        return LossSums(draft, None, None)
    return LossSums(draft, target.detach(), agreements.detach())
