"""Losses against the k likeliest tokens of the target's distributions, against plain PyTorch over all tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longspec.models import losses
from longspec.models.chain_losses import chain_cross_entropy
from longspec.models.losses import SparseTeacher, draft_numbers, linear_cross_entropy
from longspec.states.encoding import top_k_of

N, H, T, K = 40, 16, 53, 6
IDS = torch.arange(3, T, 2)
WEIGHTS = [1.0, 0.5, 0.25]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 7)
    torch.manual_seed(0)


def target(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Final hidden states, head, next tokens."""
    return torch.randn(N, H, dtype=dtype), torch.randn(T, H, dtype=dtype) / 2, torch.randint(0, T, (N,))


def teacher_of(
    hidden: Tensor, head: Tensor, labels: Tensor, k: int, ids: Tensor | None = None, temperature: float = 1.0
) -> SparseTeacher:
    tokens, log_probs, _, best, next_log_prob = top_k_of(hidden, head, k, ids, temperature, labels)
    return SparseTeacher(draft_numbers(tokens.int(), ids), log_probs, draft_numbers(best.int(), ids), next_log_prob)


def outcomes(p_NV: Tensor, log_q_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Probabilities of p's k likeliest tokens and of all others together, and the logarithms of q's: [N, k + 1] each."""
    order = p_NV.argsort(-1, descending=True)
    p, log_q = p_NV.gather(-1, order), log_q_NV.gather(-1, order)
    rest = p[:, k:].sum(-1, keepdim=True), log_q[:, k:].logsumexp(-1, keepdim=True)
    return torch.cat([p[:, :k], rest[0]], -1), torch.cat([log_q[:, :k], rest[1]], -1)


def loss_over(p: Tensor, log_q: Tensor, kind: str = "soft") -> Tensor:
    """Each row's loss, for torch's own gradient."""
    cross_entropy, rejected = -(p * log_q).sum(-1), (p - log_q.exp()).abs().sum(-1) / 2
    weight = (3 * (rejected.detach() - 1)).exp()
    lk = weight * torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1) + (1 - weight) * rejected
    return {"soft": cross_entropy, "tv": rejected, "lk": lk}[kind]


def cross_entropy(p_NV: Tensor, log_q_NV: Tensor, k: int, kind: str = "soft") -> Tensor:
    return loss_over(*outcomes(p_NV, log_q_NV, k), kind)


@pytest.mark.parametrize(("kind", "temperature"), [("soft", 1.0), ("mix", 2.5), ("lk", 0.7)])
def test_glides_loss_and_gradient(kind: str, temperature: float) -> None:
    states, head, labels = target()
    hidden = torch.randn(N, H, requires_grad=True)
    got = linear_cross_entropy(hidden, teacher_of(states, head, labels, K, None, temperature), head, labels, kind, temperature)
    logits, own = hidden.double() @ head.double().T, states.double() @ head.double().T
    of_p = "soft" if kind == "mix" else kind
    p, log_q = (own / temperature).softmax(-1), (logits / temperature).log_softmax(-1)
    wanted = cross_entropy(p, log_q, K, of_p).sum() * temperature**2
    if kind == "mix":
        wanted = (wanted + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")) / 2
    torch.testing.assert_close(got.draft.double(), wanted, rtol=1e-6, atol=0)
    (gradient,), (exact,) = (torch.autograd.grad(3 * loss, hidden) for loss in (got.draft, wanted))
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.target.double(), torch.nn.functional.cross_entropy(own, labels, reduction="sum"))
    assert int(got.agreements) == int((logits.argmax(-1) == own.argmax(-1)).sum())


def chains(dtype: torch.dtype, proposed: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A head, rows of three steps of which the last has none in some chunks, and whose rows they are."""
    places = [torch.arange(N), torch.arange(0, N, 3), torch.tensor([0, 1, 38])]
    hidden = [torch.randn(len(each), H, dtype=dtype, requires_grad=True) for each in places]
    return torch.randn(proposed, H, dtype=dtype, requires_grad=True), hidden, places


@pytest.mark.parametrize("kind", ["soft", "tv", "lk"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "some"])
def test_eagles_loss_and_gradients(ids: Tensor | None, kind: str) -> None:
    states, head, labels = target(torch.float64)
    chosen = torch.arange(T) if ids is None else ids
    weight, hidden, places = chains(torch.float64, len(chosen))
    own = states @ head.T
    exact = own[:, chosen].log_softmax(-1).topk(K)  # top_k_of's are rounded to float32
    made = teacher_of(states, head, labels, K, ids)
    assert torch.equal(made.tokens_Nk.long(), exact.indices)
    teacher = SparseTeacher(exact.indices, exact.values, made.best_N, made.next_log_prob_N)
    sums = chain_cross_entropy(weight, hidden, teacher, places, WEIGHTS, kind)
    inside = torch.isin(own.argmax(-1), chosen)
    steps = [
        (cross_entropy(own[at][:, chosen].softmax(-1), (x @ weight.T).log_softmax(-1), K, kind) * inside[at]).sum()
        for x, at in zip(hidden, places, strict=True)
    ]
    torch.testing.assert_close(sums.losses_K, torch.stack(steps).detach(), rtol=1e-12, atol=0)
    wanted = torch.stack([scale * loss for scale, loss in zip(WEIGHTS, steps, strict=True)]).sum()
    for left, right in zip(
        torch.autograd.grad(3 * sums.draft, [weight, *hidden]), torch.autograd.grad(3 * wanted, [weight, *hidden]), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
    assert sums.inside_K.tolist() == [int(inside[at].sum()) for at in places]


def loss_of(p_NV: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    top = p_NV.log().topk(k)
    teacher = SparseTeacher(top.indices, top.values, p_NV.argmax(-1), None)
    return lambda logits_NV: teacher.loss_and_gradient_(logits_NV.clone())


def test_a_rest_that_the_draft_holds_for_impossible() -> None:
    """Float32 has no such small probability: the loss says how far off it is, and the gradient leads out."""
    p = torch.tensor([[0.6, 0.3, 0.06, 0.04]])
    logits = torch.tensor([[200.0, 200.0, 0.0, 0.0]])
    loss = loss_of(p, 2)(logits)
    torch.testing.assert_close(loss, cross_entropy(p.double(), logits.double().log_softmax(-1), 2).float())
    assert 19 < float(loss) < 22
    top = p.log().topk(2)
    SparseTeacher(top.indices, top.values, top.indices[:, 0], None).loss_and_gradient_(logits)
    torch.testing.assert_close(logits, torch.tensor([[-0.1, 0.2, -0.05, -0.05]]))


@pytest.mark.parametrize("k", [3, 4])
def test_probabilities_that_rounding_brought_above_one_are_shared_anew(k: int) -> None:
    p = torch.tensor([[0.5, 0.3, 0.19, 0.01]])
    top = p.topk(k)
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0]])
    raised = SparseTeacher(top.indices, (top.values * 1.02).log(), top.indices[:, 0], None)
    loss = raised.loss_and_gradient_(gradient := logits.clone())
    merged = torch.zeros(1, 4).scatter(-1, top.indices, top.values / top.values.sum())
    torch.testing.assert_close(loss, -(merged * logits.log_softmax(-1)).sum(-1))
    torch.testing.assert_close(gradient, logits.softmax(-1) - merged)


@pytest.mark.parametrize(("ids", "temperature"), [(None, 1.0), (IDS, 0.7)], ids=["all tokens", "some"])
def test_the_likeliest_tokens(ids: Tensor | None, temperature: float) -> None:
    """Over all tokens or the draft vocabulary alone; the text's next token and the best one always of all tokens."""
    states, head, labels = target()
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
