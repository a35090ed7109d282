"""Cross entropy of linear logits against hard and soft labels, in chunks: no [tokens, vocabulary] tensor is kept.

Shapes: N tokens, C tokens of a chunk, H hidden width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models import teachers
from longspec.models.teachers import SparseTeacher

NO_LABEL = -100  # of tokens that are not trained


@dataclass
class LossSums:
    """Sums over the trained tokens; `draft` alone carries a gradient, to the draft's hidden states."""

    draft: Tensor
    target: Tensor | None  # the target's own cross entropy with the next token
    agreements: Tensor | None  # tokens whose most likely next token is the same for draft and target


# Float32 chunks [tokens, V] at once: two models' logits, a softmax, the gradient, a temporary; two of the chunk before.
LOGITS_ALIVE, LOGITS_BEFORE = 5, 2
# A sparse teacher's: the draft's logits, both gradients and a temporary, of which soft labels alone need half.
SPARSE_ALIVE, SPARSE_BEFORE = 4, 1


def loss_bytes(vocabulary: int, tokens: int, device: torch.device, *, sparse: bool = False) -> int:
    """Bytes of the logits that are alive at once while the loss of so many tokens is taken; `sparse`: of a sparse teacher's."""
    chunk = teachers.chunk_tokens(vocabulary, device)
    alive, before = (SPARSE_ALIVE, SPARSE_BEFORE) if sparse else (LOGITS_ALIVE, LOGITS_BEFORE)
    return min(tokens, chunk) * vocabulary * 4 * (alive + (before if tokens > chunk else 0))


@dataclass(frozen=True)
class _DenseLabels:
    """Labels made of the target's full logits [C, V], with the face of a SparseTeacher."""

    teacher_CV: Tensor
    next_C: Tensor

    @property
    def best_N(self) -> Tensor:
        return self.teacher_CV.argmax(-1)

    def own_loss(self) -> Tensor:
        """The target's summed cross entropy with the next tokens."""
        return F.cross_entropy(self.teacher_CV, self.next_C, reduction="sum")

    def soft_loss(self, logits_CV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Summed -sum_v p(v) log q(v), both at the temperature, and its gradient with respect to logits / temperature."""
        at_one = temperature == 1  # spares two copies of the chunk
        p_CV = (self.teacher_CV if at_one else self.teacher_CV / temperature).softmax(-1)
        log_q_CV = (logits_CV if at_one else logits_CV / temperature).log_softmax(-1)
        loss = -torch.dot(p_CV.flatten(), log_q_CV.flatten())
        return loss, log_q_CV.exp_().sub_(p_CV)


_Labels = _DenseLabels | SparseTeacher


def _labels(teacher: Tensor | SparseTeacher, part: slice, weight_VH: Tensor, next_N: Tensor) -> _Labels:
    """Those of a chunk; hidden states become logits."""
    if isinstance(teacher, SparseTeacher):
        return teacher.of(part)
    return _DenseLabels(F.linear(teacher[part], weight_VH).float(), next_N[part])


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
        chunk = teachers.chunk_tokens(weight_VH.shape[0], hidden_NH.device)
        for start in range(0, hidden_NH.shape[0], chunk):
            part = slice(start, start + chunk)
            target = None if teacher is None else _labels(teacher, part, weight_VH, labels_N)
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
    (Hinton et al. 2015, 2); of a sparse teacher's k tokens and the rest (teachers.py). mix: the mean of the two.
    """
    hard, soft = {"hard": (1.0, 0.0), "soft": (0.0, 1.0), "mix": (0.5, 0.5)}[kind]
    loss, gradient_CV = torch.zeros((), device=logits_CV.device), torch.zeros(())
    if soft:
        assert target is not None, "soft labels need the target's distribution"
        unscaled, gradient_CV = target.soft_loss(logits_CV, temperature)
        loss = loss + soft * temperature**2 * unscaled
        gradient_CV.mul_(soft * temperature)
    if hard:
        log_q_CV = logits_CV.log_softmax(-1)
        loss = loss + hard * F.nll_loss(log_q_CV, labels_C, reduction="sum")
        hard_CV = log_q_CV.exp_()
        hard_CV[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1.0
        gradient_CV = gradient_CV.to(hard_CV) + hard_CV.mul_(hard)
    return loss, gradient_CV


# Weight [V, H], hidden [N, H], labels [N] -> the summed loss and the most likely tokens [N].
FusedLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def fused_loss(device_type: str) -> FusedLoss | None:
    """Liger's fused linear cross entropy, where it runs: on a GPU, when liger-kernel is installed."""
    if device_type != "cuda" or find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    kernel = LigerFusedLinearCrossEntropyLoss(reduction="sum", return_predicted_tokens=True)

    def fused(weight_VH: Tensor, hidden_NH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        output = kernel(weight_VH, hidden_NH, labels_N)
        return output.loss.float(), output.predicted_tokens

    return fused


@torch.no_grad()
def _target_sums(
    teacher: Tensor | SparseTeacher, weight_VH: Tensor, labels_N: Tensor, predicted_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's summed cross entropy and how often its most likely token is the predicted one."""
    sums = torch.zeros(2, device=labels_N.device)
    chunk = teachers.chunk_tokens(weight_VH.shape[0], labels_N.device)
    for start in range(0, len(labels_N), chunk):
        part = slice(start, start + chunk)
        target = _labels(teacher, part, weight_VH, labels_N)
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
    if kind == "hard" and fused is not None and len(labels_N):
        draft, predicted_N = fused(weight_VH, hidden_NH, labels_N)
        sums = (None, None) if teacher is None else _target_sums(teacher, weight_VH, labels_N, predicted_N)
        return LossSums(draft, *sums)
    draft, target, agreements = _ChunkedLoss.apply(hidden_NH, teacher, weight_VH, labels_N, kind, temperature)
    if teacher is None:
        return LossSums(draft, None, None)
    return LossSums(draft, target.detach(), agreements.detach())
