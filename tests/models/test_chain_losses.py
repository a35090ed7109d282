"""The chunked loss of a chain's steps against plain PyTorch over whole logits."""

import pytest
import torch
from torch import Tensor

from longspec.models import losses
from longspec.models.chain_losses import DenseTeacher, chain_cross_entropy

N, H, T = 40, 16, 53
IDS = torch.arange(3, T, 2)
WEIGHTS = [1.0, 0.5, 0.25]


def case(ids: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], DenseTeacher, list[Tensor]]:
    """A head, rows of three steps of which the last has none in some chunks, a teacher, and whose rows they are."""
    torch.manual_seed(0)
    places = [torch.arange(N), torch.arange(0, N, 3), torch.tensor([0, 1, 38])]
    hidden = [torch.randn(len(each), H, dtype=dtype, requires_grad=True) for each in places]
    weight = torch.randn(T if ids is None else len(ids), H, dtype=dtype, requires_grad=True)
    teacher = DenseTeacher(torch.randn(N, H, dtype=dtype), torch.randn(T, H, dtype=dtype), torch.randint(0, T, (N,)), ids, True)
    return weight, hidden, teacher, places


def plain(weight: Tensor, hidden: list[Tensor], teacher: DenseTeacher, places: list[Tensor]) -> list[Tensor]:
    """Of each step the summed loss."""
    logits_NT = teacher.hidden_NH @ teacher.weight_TH.T
    ids = torch.arange(T) if teacher.ids_V is None else teacher.ids_V
    p_NV, inside_N = logits_NT[:, ids].softmax(-1), torch.isin(logits_NT.argmax(-1), ids)
    found = [-(p_NV[at] * (x @ weight.T).log_softmax(-1)).sum(-1) for x, at in zip(hidden, places, strict=True)]
    return [loss[inside_N[at]].sum() for loss, at in zip(found, places, strict=True)]


def test_the_heads_gradient_is_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a sum of 40 chunks would lose most of its bits."""
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 1)
    weight, hidden, teacher, places = case(IDS, torch.bfloat16)
    (got,) = torch.autograd.grad(chain_cross_entropy(weight, hidden, teacher, places, WEIGHTS).draft, weight)
    exact, wide = weight.detach().float().requires_grad_(), [each.detach().float() for each in hidden]
    precise = DenseTeacher(teacher.hidden_NH.float(), teacher.weight_TH.float(), teacher.labels_N, teacher.ids_V, False)
    steps = plain(exact, wide, precise, places)
    (wanted,) = torch.autograd.grad(sum(scale * loss for scale, loss in zip(WEIGHTS, steps, strict=True)), exact)
    assert got.dtype == torch.bfloat16
    assert (got.float() - wanted).norm() < 0.01 * wanted.norm()
