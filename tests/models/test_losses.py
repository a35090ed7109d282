"""Chunked losses against plain PyTorch."""

import sys
from types import SimpleNamespace

import pytest
import torch

from longspec.models import losses
from tests.largest import Largest
from tests.models.test_sparse_teacher import loss_over


def plain(hidden_NH, teacher_NH, weight_VH, labels_N, kind, temperature):
    logits, teacher = hidden_NH @ weight_VH.T, teacher_NH @ weight_VH.T
    hard = torch.nn.functional.cross_entropy(logits, labels_N, reduction="sum")
    p = (teacher / temperature).softmax(-1)
    if kind == "hard":
        return hard
    soft = loss_over(p, (logits / temperature).log_softmax(-1), "soft" if kind == "mix" else kind).sum() * temperature**2
    return (hard + soft) / 2 if kind == "mix" else soft


@pytest.mark.parametrize("kind", ["hard", "soft", "mix", "tv", "lk"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_value_and_gradient_over_many_chunks(monkeypatch: pytest.MonkeyPatch, kind: str, temperature: float) -> None:
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 7)
    torch.manual_seed(0)
    hidden_NH = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    teacher_NH, weight_VH = torch.randn(40, 16, dtype=torch.float64), torch.randn(53, 16, dtype=torch.float64)
    labels_N = torch.randint(0, 53, (40,))
    got = losses.linear_cross_entropy(hidden_NH, teacher_NH, weight_VH, labels_N, kind, temperature)
    expected = plain(hidden_NH, teacher_NH, weight_VH, labels_N, kind, temperature)
    # Logits are float32 in the loss, whatever the weights are.
    torch.testing.assert_close(got.draft.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(3 * got.draft, hidden_NH)
    (wanted,) = torch.autograd.grad(3 * expected, hidden_NH)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
    own = torch.nn.functional.cross_entropy(teacher_NH @ weight_VH.T, labels_N, reduction="sum")
    torch.testing.assert_close(got.target.double(), own, rtol=1e-5, atol=1e-5)
    same = ((hidden_NH @ weight_VH.T).argmax(-1) == (teacher_NH @ weight_VH.T).argmax(-1)).sum()
    assert int(got.agreements) == int(same)


@pytest.mark.parametrize("kind", ["hard", "soft", "mix"])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Near the same numbers in float64; and a scale that bfloat16 cannot hold reaches the gradient unrounded."""
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 7)
    torch.manual_seed(0)
    hidden_NH = torch.randn(40, 16).bfloat16().requires_grad_()
    teacher_NH, weight_VH = torch.randn(40, 16).bfloat16(), torch.randn(53, 16).bfloat16()
    labels_N = torch.randint(0, 53, (40,))
    got = losses.linear_cross_entropy(hidden_NH, teacher_NH, weight_VH, labels_N, kind).draft
    exact_NH = hidden_NH.detach().double().requires_grad_()
    wanted = plain(exact_NH, teacher_NH.double(), weight_VH.double(), labels_N, kind, 1.0)
    torch.testing.assert_close(got.double(), wanted, rtol=5e-3, atol=0)
    (gradient,), (wanted_gradient,) = (
        torch.autograd.grad(got, hidden_NH, retain_graph=True),
        torch.autograd.grad(wanted, exact_NH),
    )
    assert (gradient.double() - wanted_gradient).norm() < 2e-2 * wanted_gradient.norm()
    (scaled,) = torch.autograd.grad(got / 7.03, hidden_NH)
    assert torch.equal(scaled, (gradient.float() * (1 / torch.tensor(7.03))).bfloat16())


def test_a_chunk_holds_its_bytes_and_at_least_some_tokens() -> None:
    cpu = torch.device("cpu")
    assert losses.chunk_tokens(1024, cpu) * 1024 * 4 == losses.CHUNK_BYTES["cpu"]
    assert losses.chunk_tokens(152_064, cpu) == losses.LEAST_TOKENS


@pytest.mark.parametrize("kind", ["hard", "soft", "mix"])
def test_no_float32_tensor_of_all_logits_is_made(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The largest tensor of forward and backward is a chunk of logits, not [N, V]."""
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 8)
    largest = Largest()
    hidden_NH, teacher_NH = torch.randn(96, 16, requires_grad=True), torch.randn(96, 16)
    weight_VH, labels_N = torch.randn(500, 16), torch.randint(0, 500, (96,))
    with largest:
        losses.linear_cross_entropy(hidden_NH, teacher_NH, weight_VH, labels_N, kind, 2.0).draft.backward()
    assert 500 * 8 <= largest.elements <= 500 * 16  # the head itself; a chunk is half of it, all logits are six times as many


class LigerStandIn:
    """The signature and the meaning of liger-kernel's LigerFusedLinearCrossEntropyLoss, in plain PyTorch."""

    def __init__(self, reduction: str = "mean", return_predicted_tokens: bool = False) -> None:
        assert (reduction, return_predicted_tokens) == ("sum", True)

    def __call__(self, lin_weight, _input, target, bias=None):
        logits = _input @ lin_weight.T
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        return SimpleNamespace(loss=loss, predicted_tokens=logits.argmax(-1))


@pytest.fixture
def liger_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if liger-kernel were installed and this were a GPU."""
    package = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=LigerStandIn)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(losses, "find_spec", lambda _: object())
    kernel = losses.fused_loss.__wrapped__("cuda")
    monkeypatch.setattr(losses, "fused_loss", lambda _: kernel)


def small_case(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden_NH = torch.randn(300, 64, device=device, dtype=dtype, requires_grad=True)
    teacher_NH, weight_VH = (torch.randn(rows, 64, device=device, dtype=dtype) for rows in (300, 1000))
    return [hidden_NH, teacher_NH, weight_VH, torch.randint(0, 1000, (300,), device=device)]


def assert_same_as_chunked(monkeypatch: pytest.MonkeyPatch, case: list[torch.Tensor], tolerance: float) -> None:
    """Sums and gradient of the fused kernel against our own chunks."""
    hidden_NH = case[0]
    fused = losses.linear_cross_entropy(*case, "hard")
    (gradient,) = torch.autograd.grad(3 * fused.draft, hidden_NH)
    monkeypatch.setattr(losses, "fused_loss", lambda _: None)
    chunked = losses.linear_cross_entropy(*case, "hard")
    (wanted,) = torch.autograd.grad(3 * chunked.draft, hidden_NH)
    torch.testing.assert_close(fused.draft, chunked.draft, rtol=tolerance, atol=0)
    torch.testing.assert_close(fused.target, chunked.target, rtol=tolerance, atol=0)
    assert abs(int(fused.agreements) - int(chunked.agreements)) <= (0 if tolerance < 1e-3 else 3)
    assert (gradient - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.usefixtures("liger_stand_in")
def test_what_the_fused_kernel_is_given_and_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_as_chunked(monkeypatch, small_case("cpu", torch.float32), 1e-5)


@pytest.mark.usefixtures("liger_stand_in")
def test_the_fused_kernel_is_for_hard_labels_of_some_tokens() -> None:
    hidden_NH, teacher_NH, weight_VH, labels_N = small_case("cpu", torch.float32)
    alone = losses.linear_cross_entropy(hidden_NH, None, weight_VH, labels_N, "hard")
    assert (alone.target, alone.agreements) == (None, None)
    assert (
        "_ChunkedLoss"
        in type(losses.linear_cross_entropy(hidden_NH, teacher_NH, weight_VH, labels_N, "soft").draft.grad_fn).__name__
    )
    assert losses.linear_cross_entropy(hidden_NH[:0], None, weight_VH, labels_N[:0], "hard").draft == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_liger_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float) -> None:
    pytest.importorskip("liger_kernel")
    assert losses.fused_loss("cuda") is not None
    assert_same_as_chunked(monkeypatch, small_case("cuda", dtype), tolerance)
