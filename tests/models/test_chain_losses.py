"""The chunked loss of a chain's steps against plain PyTorch over whole logits."""

import pytest
import torch
from torch import Tensor

from longspec.models import losses
from longspec.models.chain_losses import DenseTeacher, chain_cross_entropy
from tests.models.test_sparse_teacher import loss_over

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


def plain(
    weight: Tensor, hidden: list[Tensor], teacher: DenseTeacher, places: list[Tensor], kind: str = "soft"
) -> list[Tensor]:
    """Of each step the summed loss."""
    logits_NT = teacher.hidden_NH @ teacher.weight_TH.T
    ids = torch.arange(T) if teacher.ids_V is None else teacher.ids_V
    p_NV, inside_N = logits_NT[:, ids].softmax(-1), torch.isin(logits_NT.argmax(-1), ids)
    found = [loss_over(p_NV[at], (x @ weight.T).log_softmax(-1), kind) for x, at in zip(hidden, places, strict=True)]
    return [loss[inside_N[at]].sum() for loss, at in zip(found, places, strict=True)]


@pytest.mark.parametrize("kind", ["soft", "tv", "lk"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "some"])
def test_value_and_gradients_over_many_chunks(monkeypatch: pytest.MonkeyPatch, ids: Tensor | None, kind: str) -> None:
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 7)
    weight, hidden, teacher, places = case(ids, torch.float64)
    sums = chain_cross_entropy(weight, hidden, teacher, places, WEIGHTS, kind)
    steps = plain(weight, hidden, teacher, places, kind)
    wanted = torch.stack([scale * loss for scale, loss in zip(WEIGHTS, steps, strict=True)]).sum()
    torch.testing.assert_close(sums.draft, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(sums.losses_K, torch.stack(steps).detach(), rtol=1e-12, atol=0)
    got = torch.autograd.grad(3 * sums.draft, [weight, *hidden])
    for left, right in zip(got, torch.autograd.grad(3 * wanted, [weight, *hidden]), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
    target = torch.nn.functional.cross_entropy(teacher.hidden_NH @ teacher.weight_TH.T, teacher.labels_N, reduction="sum")
    torch.testing.assert_close(sums.target, target, rtol=1e-12, atol=0)


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
