"""Chunked losses against plain PyTorch over whole logits, by the target's distribution and by its k likeliest tokens alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models import losses
from longspec.models.chain_losses import chain_cross_entropy
from longspec.models.losses import linear_cross_entropy
from longspec.models.teachers import DenseTeacher, SparseTeacher, Teacher, draft_numbers
from longspec.states.declaration import top_k_of
from tests.largest import Largest

N, H, T, K = 40, 16, 53, 6
OWN_TOLERANCE = {None: 1e-12, K: 1e-6}  # of the target's own loss: what is stored of it is float32
IDS = torch.arange(3, T, 2)
WEIGHTS = [1.0, 0.5, 0.25]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 7)
    torch.manual_seed(0)


def target(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden states, head, next tokens."""
    return torch.randn(N, H, dtype=dtype), torch.randn(T, H, dtype=dtype) / 2, torch.randint(0, T, (N,))


def teacher_of(
    states: Tensor, head: Tensor, labels: Tensor, k: int | None, ids: Tensor | None = None, temperature: float = 1.0
) -> Teacher:
    """k None: of the whole distributions."""
    if k is None:
        return DenseTeacher(states, head, labels, ids, True, temperature=temperature)
    logits = states @ head.T
    top = (logits[:, torch.arange(T) if ids is None else ids] / temperature).log_softmax(-1).topk(k)
    told = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return SparseTeacher(top.indices, top.values, draft_numbers(logits.argmax(-1), ids), told, temperature)


def loss_over(p: Tensor, log_q: Tensor, kind: str, k: int | None) -> Tensor:
    """Each row's loss, for torch's own gradient; k: over p's k likeliest tokens, and all others as one."""
    if k is not None:
        order = p.argsort(-1, descending=True)
        p, log_q = p.gather(-1, order), log_q.gather(-1, order)
        p = torch.cat([p[:, :k], p[:, k:].sum(-1, keepdim=True)], -1)
        log_q = torch.cat([log_q[:, :k], log_q[:, k:].logsumexp(-1, keepdim=True)], -1)
    cross_entropy, rejected = -(p * log_q).sum(-1), (p - log_q.exp()).abs().sum(-1) / 2
    weight = (3 * (rejected.detach() - 1)).exp()
    lk = weight * F.kl_div(log_q, p, reduction="none").sum(-1) + (1 - weight) * rejected
    return {"soft": cross_entropy, "tv": rejected, "lk": lk}[kind]


def plain(hidden: Tensor, states: Tensor, head: Tensor, labels: Tensor, kind: str, temperature: float, k: int | None) -> Tensor:
    logits = hidden @ head.T
    hard = F.cross_entropy(logits, labels, reduction="sum")
    if kind == "hard":
        return hard
    p, log_q = (states @ head.T / temperature).softmax(-1), (logits / temperature).log_softmax(-1)
    soft = loss_over(p, log_q, "soft" if kind == "mix" else kind, k).sum() * temperature**2
    return (hard + soft) / 2 if kind == "mix" else soft


@pytest.mark.parametrize("kind", ["hard", "soft", "mix", "tv", "lk"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [None, K])
def test_glides_loss_and_gradient(k: int | None, temperature: float, kind: str) -> None:
    states, head, labels = target()
    hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
    teacher = teacher_of(states, head, labels, k, None, temperature)
    got, of_target, agreements = linear_cross_entropy(hidden, teacher, head, labels, kind)
    wanted = plain(hidden, states, head, labels, kind, temperature, k)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    (gradient,), (exact,) = (torch.autograd.grad(3 * loss, hidden) for loss in (got, wanted))
    torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-11)
    own = states @ head.T
    torch.testing.assert_close(of_target, F.cross_entropy(own, labels, reduction="sum"), rtol=OWN_TOLERANCE[k], atol=0)
    assert int(agreements) == int(((hidden @ head.T).argmax(-1) == own.argmax(-1)).sum())


@pytest.mark.parametrize("kind", ["hard", "soft", "mix"])
def test_bfloat16(kind: str) -> None:
    """Near the same numbers in float64; and a scale that bfloat16 cannot hold reaches the gradient unrounded."""
    states, head, labels = target(torch.bfloat16)
    hidden = torch.randn(N, H).bfloat16().requires_grad_()
    got, *_ = linear_cross_entropy(hidden, teacher_of(states, head, labels, None), head, labels, kind)
    exact = hidden.detach().double().requires_grad_()
    wanted = plain(exact, states.double(), head.double(), labels, kind, 1.0, None)
    torch.testing.assert_close(got.double(), wanted, rtol=5e-3, atol=0)
    (gradient,) = torch.autograd.grad(got, hidden, retain_graph=True)
    (wanted_gradient,) = torch.autograd.grad(wanted, exact)
    assert (gradient.double() - wanted_gradient).norm() < 2e-2 * wanted_gradient.norm()
    (scaled,) = torch.autograd.grad(got / 7.03, hidden)
    assert torch.equal(scaled, (gradient.float() * (1 / torch.tensor(7.03))).bfloat16())


@pytest.mark.parametrize("kind", ["hard", "soft", "mix"])
def test_no_tensor_of_all_logits_is_made(kind: str) -> None:
    hidden, states, head = torch.randn(96, 16, requires_grad=True), torch.randn(96, 16), torch.randn(500, 16)
    labels = torch.randint(0, 500, (96,))
    with Largest() as largest:
        linear_cross_entropy(hidden, teacher_of(states, head, labels, None, None, 2.0), head, labels, kind)[0].backward()
    assert 500 * 7 <= largest.elements <= 500 * 16  # the head itself; all logits are six times as many


def test_a_chunk_holds_its_bytes_and_at_least_some_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cpu = torch.device("cpu")
    assert losses.chunk_tokens(1024, cpu) * 1024 * 4 == losses.CHUNK_BYTES["cpu"]
    assert losses.chunk_tokens(152_064, cpu) == losses.LEAST_TOKENS


def chains(dtype: torch.dtype, proposed: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A head, rows of three steps of which the last has none in some chunks, and whose rows they are."""
    places = [torch.arange(N), torch.arange(0, N, 3), torch.tensor([0, 1, 38])]
    hidden = [torch.randn(len(each), H, dtype=dtype, requires_grad=True) for each in places]
    return torch.randn(proposed, H, dtype=dtype, requires_grad=True), hidden, places


def plain_steps(teacher: tuple[Tensor, Tensor], ids: Tensor, given: tuple[Any, ...], kind: str, k: int | None) -> list[Tensor]:
    """Of each step the summed loss."""
    (states, head), (weight, hidden, places) = teacher, given
    own = states @ head.T
    p, inside = own[:, ids].softmax(-1), torch.isin(own.argmax(-1), ids)
    found = [loss_over(p[at], (x @ weight.T).log_softmax(-1), kind, k) for x, at in zip(hidden, places, strict=True)]
    return [(loss * inside[at]).sum() for loss, at in zip(found, places, strict=True)]


def weighted(steps: list[Tensor]) -> Tensor:
    return torch.stack([scale * loss for scale, loss in zip(WEIGHTS, steps, strict=True)]).sum()


@pytest.mark.parametrize("kind", ["soft", "tv", "lk"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "some"])
@pytest.mark.parametrize("k", [None, K])
def test_eagles_loss_and_gradients(k: int | None, ids: Tensor | None, kind: str) -> None:
    states, head, labels = target()
    chosen = torch.arange(T) if ids is None else ids
    weight, hidden, places = given = chains(torch.float64, len(chosen))
    sums = chain_cross_entropy(weight, hidden, teacher_of(states, head, labels, k, ids), places, WEIGHTS, kind)
    steps = plain_steps((states, head), chosen, given, kind, k)
    torch.testing.assert_close(sums.losses_K, torch.stack(steps).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sums.draft, weighted(steps), rtol=1e-12, atol=0)
    got, wanted = (torch.autograd.grad(3 * loss, [weight, *hidden]) for loss in (sums.draft, weighted(steps)))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    own = states @ head.T
    torch.testing.assert_close(sums.target, F.cross_entropy(own, labels, reduction="sum"), rtol=OWN_TOLERANCE[k], atol=0)
    assert sums.inside_K.tolist() == [int(torch.isin(own.argmax(-1), chosen)[at].sum()) for at in places]


def test_the_heads_gradient_is_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a sum of 40 chunks would lose most of its bits."""
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 1)
    states, head, labels = target(torch.bfloat16)
    weight, hidden, places = chains(torch.bfloat16, len(IDS))
    sums = chain_cross_entropy(weight, hidden, teacher_of(states, head, labels, None, IDS), places, WEIGHTS)
    (got,) = torch.autograd.grad(sums.draft, weight)
    exact, wide = weight.detach().float().requires_grad_(), [each.detach().float() for each in hidden]
    steps = plain_steps((states.float(), head.float()), IDS, (exact, wide, places), "soft", None)
    (wanted,) = torch.autograd.grad(weighted(steps), exact)
    assert got.dtype == torch.bfloat16
    assert (got.float() - wanted).norm() < 0.01 * wanted.norm()


def test_a_rest_that_the_draft_holds_for_impossible() -> None:
    """Float32 has no such small probability: the loss says how far off it is, and the gradient leads out."""
    p, logits = torch.tensor([[0.6, 0.3, 0.06, 0.04]]), torch.tensor([[200.0, 200.0, 0.0, 0.0]])
    wanted = loss_over(p.double(), logits.double().log_softmax(-1), "soft", 2).float()
    top = p.log().topk(2)
    loss = SparseTeacher(top.indices, top.values, top.indices[:, 0], None).loss_and_gradient_(logits)
    torch.testing.assert_close(loss, wanted)
    assert 19 < float(loss) < 22
    torch.testing.assert_close(logits, torch.tensor([[-0.1, 0.2, -0.05, -0.05]]))


@pytest.mark.parametrize("k", [3, 4])
def test_probabilities_that_rounding_brought_above_one_are_shared_anew(k: int) -> None:
    p, logits = torch.tensor([[0.5, 0.3, 0.19, 0.01]]), torch.tensor([[1.0, -1.0, 0.5, 2.0]])
    top = p.topk(k)
    raised = SparseTeacher(top.indices, (top.values * 1.02).log(), top.indices[:, 0], None)
    loss = raised.loss_and_gradient_(gradient := logits.clone())
    merged = torch.zeros(1, 4).scatter(-1, top.indices, top.values / top.values.sum())
    torch.testing.assert_close(loss, -(merged * logits.log_softmax(-1)).sum(-1))
    torch.testing.assert_close(gradient, logits.softmax(-1) - merged)


@pytest.mark.parametrize(("ids", "temperature"), [(None, 1.0), (IDS, 0.7)], ids=["all tokens", "some"])
def test_the_likeliest_tokens(ids: Tensor | None, temperature: float) -> None:
    """Over all tokens or the draft vocabulary alone; the text's next token and the best one always of all tokens."""
    states, head, labels = target(torch.float32)
    tokens, log_probs, log_sum_exp, best, next_log_prob = top_k_of(states, head, K, ids, temperature, labels)
    logits = states @ head.T
    part = torch.full((T,), -torch.inf)
    part[torch.arange(T) if ids is None else ids] = 0.0
    scaled = logits / temperature + part
    torch.testing.assert_close((log_probs, tokens), tuple(scaled.log_softmax(-1).topk(K)))
    torch.testing.assert_close(log_sum_exp, scaled.logsumexp(-1))
    assert torch.equal(best, logits.argmax(-1))
    torch.testing.assert_close(next_log_prob, logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0])
    none = top_k_of(states[:0], head, K, ids, temperature, labels[:0])
    assert [part.shape for part in none] == [(0, K), (0, K), (0,), (0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_in_the_drafts_numbers(dtype: torch.dtype) -> None:
    tokens = torch.tensor([[3, 5, 0], [4, 51, 52]], dtype=dtype)
    numbers = draft_numbers(tokens, IDS)
    assert (numbers.tolist(), numbers.dtype) == ([[0, 1, -1], [-1, 24, -1]], dtype)
    assert draft_numbers(tokens, None) is tokens
