"""Compute the target's side of a loss: its whole distribution, or its k likeliest tokens if only these are stored.

With p the target's distribution over V tokens, K its k likeliest, q the draft's, r(p) = 1 - sum_{v in K} p(v), the loss is

    loss     = - sum_{v in K} p(v) log q(v) - r(p) log r(q)
    gradient = q(v) - p(v)                    in K, with respect to the draft's logit of v
               q(v) - r(p) q(v) / r(q)        outside

The tokens outside K are one outcome. So the loss minus the entropy of p's k + 1 outcomes is a Kullback-Leibler divergence. This
is never negative, 0 if q gives each token of K and the rest what p gives them, and never above the divergence over all V tokens
(merging outcomes loses information). How q shares the rest among its tokens is not taught. With k = V the loss is the cross
entropy of the whole distribution.

Other losses are closer to how often a token drawn from q is kept, with probability a = sum_v min(p(v), q(v))
(Leviathan et al. 2023, section 3.2):

    tv    1 - a, the total variation
    lk    w KL(p || q) + (1 - w) (1 - a) with w = exp(-3 a), a constant to the gradient (arXiv 2602.23881)

The gradient of tv vanishes if the draft gives the target's tokens no probability; lk begins with that of the divergence.

Shapes: N tokens, C tokens of a chunk, M rows, H hidden width, T target's vocabulary, V the tokens of the distributions; O
outcomes: all tokens; or the k likeliest ones, and all others together as the last.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.config.schema import LK, SOFT, TV

# Each of the k tokens takes an int32 number and a float16 log-probability. Rounding to float16 moves a distribution 15 to 33
# times less than to bfloat16 (nats of divergence, k = 64 and 256, benchmarks/top_k_labels.py); no such number leaves its range.
TOP_BYTES = 6
FALL = 3.0  # how fast the divergence's weight falls as a grows


def acceptance_loss(kind: str, p_NO: Tensor, q_NO: Tensor, cross_entropy_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss [N] of this kind and its gradient [N, O] with respect to the logits of the outcomes.

    p_NO, q_NO: float, each row's sum 1; cross_entropy_N: -sum p log q of each row.
    """
    is_below_NO = q_NO < p_NO
    kept_N1 = torch.minimum(p_NO, q_NO).sum(-1, keepdim=True)
    # d(1 - a)/dq is -1 where q < p; through the softmax a token's part is q times (the mass of q there, less that -1).
    gradient_NO = ((q_NO * is_below_NO).sum(-1, keepdim=True) - is_below_NO.to(q_NO.dtype)).mul_(q_NO)
    if kind == TV:
        return 1 - kept_N1[:, 0], gradient_NO
    assert kind == LK, kind
    weight_N1 = torch.exp(-FALL * kept_N1)
    divergence_N = cross_entropy_N + torch.xlogy(p_NO, p_NO).sum(-1)
    loss_N = torch.lerp(1 - kept_N1[:, 0], divergence_N, weight_N1[:, 0])
    return loss_N, torch.lerp(gradient_NO, q_NO - p_NO, weight_N1)


def draft_numbers(tokens: Tensor, ids_V: Tensor | None) -> Tensor:
    """Return the draft's numbers of the target's tokens, -1 if it cannot propose one; the integer dtype stays the same.

    ids_V: the draft vocabulary, ascending; None: all tokens.
    """
    if ids_V is None:
        return tokens
    ids_V = ids_V.to(tokens.dtype)
    numbers = torch.searchsorted(ids_V, tokens, out_int32=tokens.dtype == torch.int32).clamp_(max=len(ids_V) - 1)
    return torch.where(ids_V[numbers] == tokens, numbers, -1)


@dataclass(frozen=True)
class DenseLabels:
    """Hold what a draft learns from the target at some tokens: its whole distributions.

    p_NV: the target's probabilities of the draft's tokens, at the temperature; best_N: the draft's number of the target's
    likeliest token, -1 if the draft cannot propose it; own_loss_N: the target's cross entropy with the next token.
    """

    p_NV: Tensor
    best_N: Tensor
    own_loss_N: Tensor
    temperature: float

    def of(self, rows: Tensor) -> "DenseLabels":
        """Return the labels of some of the tokens; no copy of the distributions if they are all."""
        p_MV = self.p_NV if len(rows) == len(self.p_NV) else self.p_NV[rows]
        return DenseLabels(p_MV, self.best_N[rows], self.own_loss_N[rows], self.temperature)

    def loss_and_gradient_(self, logits_MV: Tensor, kind: str = SOFT) -> Tensor:
        """Return -sum_v p(v) log q(v) of each row; the logits become its gradient q - p with respect to them.

        kind: soft; tv or lk: return that loss instead, and its gradient.
        """
        log_q_MV = logits_MV.log_softmax(-1)
        loss_M = -torch.linalg.vecdot(self.p_NV, log_q_MV)
        torch.exp(log_q_MV, out=logits_MV)
        if kind == SOFT:
            logits_MV.sub_(self.p_NV)
            return loss_M
        del log_q_MV  # before the gradient is made
        loss_M, gradient_MV = acceptance_loss(kind, self.p_NV, logits_MV, loss_M)
        logits_MV.copy_(gradient_MV)
        return loss_M


@dataclass(frozen=True)
class DenseTeacher:
    """Hold the frozen target's hidden states and next tokens of N tokens, its head, and what a draft can propose of it."""

    hidden_NH: Tensor  # after the final norm
    weight_TH: Tensor
    labels_N: Tensor
    ids_V: Tensor | None  # the draft vocabulary in the target's tokens, ascending; None: all tokens
    with_loss: bool  # whether the target's own cross entropy is wanted
    best_N: Tensor | None = None  # the likeliest tokens, if rounding may have changed what hidden_NH gives
    temperature: float = 1.0  # of both distributions

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def target_vocabulary(self) -> int:
        """Return the number of logits computed for each token on the target's side."""
        return len(self.weight_TH)

    def of(self, part: slice | Tensor) -> DenseLabels:
        """Return the labels of some of the tokens; this computes their logits."""
        teacher_CT = F.linear(self.hidden_NH[part], self.weight_TH)
        teacher_CT = teacher_CT.to(torch.promote_types(teacher_CT.dtype, torch.float32))
        best_C = teacher_CT.argmax(-1) if self.best_N is None else self.best_N[part].long()
        loss_C = torch.zeros_like(best_C, dtype=teacher_CT.dtype)
        if self.with_loss:
            loss_C = teacher_CT.logsumexp(-1) - teacher_CT.gather(-1, self.labels_N[part, None])[:, 0]
        teacher_CV = teacher_CT if self.ids_V is None else teacher_CT[:, self.ids_V]
        p_CV = (teacher_CV if self.temperature == 1 else teacher_CV / self.temperature).softmax(-1)
        return DenseLabels(p_CV, draft_numbers(best_C, self.ids_V), loss_C, self.temperature)


@dataclass(frozen=True)
class SparseTeacher:
    """Hold the target's side of a loss without its hidden states and head. Tokens are the draft's own numbers.

    tokens_Nk: int32 or int64, each once; log_probs_Nk: any floating dtype, at the temperature. best_N: the target's likeliest
    token, -1: the draft cannot propose it, and the row has no loss if the draft has its own vocabulary. next_log_prob_N: of
    the next tokens; None: the target's own loss is not wanted.
    """

    tokens_Nk: Tensor
    log_probs_Nk: Tensor
    best_N: Tensor
    next_log_prob_N: Tensor | None
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.tokens_Nk)

    @property
    def target_vocabulary(self) -> int:
        """Return the number of logits computed for each token on the target's side: 0."""
        return 0

    @property
    def with_loss(self) -> bool:
        """Tell whether the target's own cross entropy is wanted."""
        return self.next_log_prob_N is not None

    def of(self, rows: slice | Tensor) -> "SparseTeacher":
        """Return the teacher of some of the tokens."""
        next_log_prob = None if self.next_log_prob_N is None else self.next_log_prob_N[rows]
        return SparseTeacher(self.tokens_Nk[rows], self.log_probs_Nk[rows], self.best_N[rows], next_log_prob, self.temperature)

    @property
    def own_loss_N(self) -> Tensor:
        """Return the target's own cross entropy with the next token; 0 if it is not wanted."""
        told_N = self.next_log_prob_N
        return torch.zeros_like(self.best_N, dtype=torch.float32) if told_N is None else -told_N.float()

    def loss_and_gradient_(self, logits_NV: Tensor, kind: str = SOFT) -> Tensor:
        """Return the loss [N] of the draft's logits, float32 or wider; they become its gradient with respect to them.

        kind: soft, the cross entropy; tv or lk.
        """
        tokens_Nk = self.tokens_Nk.long()
        p_Nk, rest_N1 = self._distribution(logits_NV.dtype, tokens_Nk.shape[1] < logits_NV.shape[1])
        top_Nk = logits_NV.gather(-1, tokens_Nk)
        logits_NV.scatter_(-1, tokens_Nk, -torch.inf)
        # All in logarithms, so that a rest with no probability in the draft still has a loss and a gradient. If there are no
        # other tokens, the least number stands for -inf, so that 0 times infinity never occurs.
        least = torch.finfo(logits_NV.dtype).min
        highest_N1 = logits_NV.amax(-1, keepdim=True).clamp_(min=least)
        # One exponential serves the sum and the gradient. The highest one is 1, so the sum is 0 or at least 1.
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

    def _distribution(self, dtype: torch.dtype, has_rest: bool) -> tuple[Tensor, Tensor]:
        """Return p of the k tokens and of the rest. They sum to 1, even if rounding in storage put the k tokens above it."""
        p_Nk = self.log_probs_Nk.to(dtype).exp()
        sum_N1 = p_Nk.sum(-1, keepdim=True)
        if not has_rest:
            return p_Nk / sum_N1, torch.zeros_like(sum_N1)
        return p_Nk / sum_N1.clamp(min=1), (1 - sum_N1).clamp(min=0)


Teacher = DenseTeacher | SparseTeacher
Labels = DenseLabels | SparseTeacher
