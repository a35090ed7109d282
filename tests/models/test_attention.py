"""Every attention backend against the published rule, written out pair by pair, in values and in every gradient.

Shapes: B rows, N query heads, K key/value heads, S queries or chains, T keys, D head width.
"""

from dataclasses import dataclass
from functools import cache
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from longspec.models.attention import chains, flex, sdpa
from longspec.models.attention.backends import AUTO, FLASH, FLEX, SDPA, attend
from longspec.models.attention.visibility import Visibility
from tests.eager import EAGER
from tests.reference import attention

LENGTH = 70
DOCUMENTS = {
    "one": None,
    "packed": (((0, 23), (1, 1), (2, 41), (-1, 5)), ((0, 3), (1, 2), (2, 65))),
    "alike": (((4, 30), (5, 40)),) * 2,
    "padding": (((-1, LENGTH),), ((0, LENGTH),)),
    "nothing": (((-1, LENGTH),),) * 2,
}
LAGS: dict[str, tuple[int, int] | int | None] = {"none": None, "same": (2, 2), "differs": (1, 4), "long": (0, 33), "blocks": 4}
BACKENDS = (EAGER, SDPA, FLASH, FLEX)
PLAIN = "plain blocks"  # sdpa's parts as they are on a GPU
TRAINS = (EAGER, SDPA, PLAIN, FLASH)
DOUBLE = torch.float64
TOLERANCE = {DOUBLE: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """What one call is given."""

    documents: tuple[tuple[tuple[int, int], ...], ...] | None  # (id, length) of each row's runs
    window: int | None = None
    lag: tuple[int, int] | int | None = None  # of each row, or the size of blocks
    queries: int = LENGTH
    keys: int = LENGTH
    heads: tuple[int, int, int] = (4, 2, 12)
    steps: int = 0  # of chains, with keys of their own

    def visibility(self) -> Visibility:
        ids_BT = None
        if self.documents is not None:
            ids_BT = torch.tensor([[number for number, length in row for _ in range(length)] for row in self.documents])
        if isinstance(self.lag, int):
            return Visibility(window=self.window, lag_blocks=self.lag, document_ids_BT=ids_BT)
        lag_B = None if self.lag is None else torch.tensor(self.lag)
        return Visibility(window=self.window, lag_B=lag_B, document_ids_BT=ids_BT)

    def seen_ST(self, row: int) -> Tensor:
        return pair_by_pair(self, row)

    def tensors(self, dtype: torch.dtype = DOUBLE) -> list[Tensor]:
        """q, k, v, a chain's own keys and values by step, and a gradient of the output."""
        draw = torch.Generator().manual_seed(1)
        heads, kv_heads, width = self.heads
        own = [(kv_heads, self.queries)] * 2 * self.steps
        shapes = [(heads, self.queries), *[(kv_heads, self.keys)] * 2, *own, (heads, self.queries)]
        return [torch.randn(2, *shape, width, generator=draw, dtype=DOUBLE).to(dtype) for shape in shapes]


@cache
def pair_by_pair(case: Case, row: int) -> Tensor:
    """The published rule: whether query s sees key t, [S, T]."""
    runs = ((0, case.keys),) if case.documents is None else case.documents[row]
    starts = [sum(length for _, length in runs[:place]) for place in range(len(runs))]
    run_of = [(number, start) for (number, length), start in zip(runs, starts, strict=True) for _ in range(length)]
    seen = torch.zeros(case.queries, case.keys, dtype=torch.bool)
    for query in range(case.queries):
        i = query + case.keys - case.queries
        for j in range(case.keys):
            (number, start), visible = run_of[i], run_of[i] == run_of[j]
            if case.window is not None:
                visible = visible and i - j <= case.window
            if isinstance(case.lag, int):
                visible = visible and (j - start) // case.lag < (i - start) // case.lag
            else:
                visible = visible and j <= i - (0 if case.lag is None else case.lag[row])
            seen[query, j] = visible and number != -1
    return seen


@cache
def expected(case: Case) -> list[Tensor]:
    """Output [B, N, S, D] and all gradients, in float64, row by row with dense masks: one softmax over text and own keys."""
    *given, grad = case.tensors()
    q, k, v, *own = (x.requires_grad_() for x in given)
    rows = []
    for row in range(2):
        seen_ST = case.seen_ST(row)
        seen = torch.cat([seen_ST, *[torch.diag(seen_ST.any(-1))] * case.steps], dim=1)
        keys, values = (torch.cat([x[row] for x in some], dim=1) for some in ((k, *own[::2]), (v, *own[1::2])))
        rows.append(attention(q[row], keys, values, seen).unflatten(1, (q.shape[1], -1)))
    out = torch.stack(rows).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def attended(backend: str, case: Case, given: list[Tensor], visibility: Visibility | None = None) -> Tensor:
    q, k, v, *own = given
    pairs = list(zip(own[::2], own[1::2], strict=True))
    chosen = SDPA if backend == PLAIN else backend
    return attend(q, k, v, visibility or case.visibility(), case.heads[2] ** -0.5, chosen, own=pairs)


def check(
    backend: str, case: Case, dtype: torch.dtype = DOUBLE, visibility: Visibility | None = None, *, trains: bool | None = None
) -> None:
    """Same output and gradients as the rule; exact zeros where a query sees nothing."""
    *given, grad = case.tensors(dtype)
    trains = backend != FLEX if trains is None else trains  # no backward on a CPU
    for x in given:
        x.requires_grad_(trains)
    out = attended(backend, case, given, visibility)
    got = [out, *torch.autograd.grad(out, given, grad)] if trains else [out]
    assert all(x.dtype == dtype for x in got)
    for left, right in zip(got, expected(case), strict=trains):
        torch.testing.assert_close(left.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(2):
        blind_S = ~case.seen_ST(row).any(-1)
        assert not any(x[row, :, blind_S].any() for x in got[:2])


@pytest.fixture(autouse=True)
def small_blocks_and_stand_ins(stand_ins: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Blocks smaller than the rows, flash-attn's stand-in, flex_attention uncompiled, and sdpa as on a GPU where asked for."""
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 16)
    monkeypatch.setattr(flex, "BLOCK", 16)
    monkeypatch.setattr(chains, "BLOCK", {"cpu": 2 * 4 * 12 * 16})
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == PLAIN:
        monkeypatch.setattr(sdpa, "KERNEL_DEVICE", "none")


PACKED = DOCUMENTS["packed"]
TEXTS = [
    *(
        (Case(DOCUMENTS[documents], window, LAGS[lag]), DOUBLE)
        for (documents, lag), window in zip(product(("one", "packed", "alike"), LAGS), cycle([None, 20]), strict=False)
    ),
    # Queries at the end of more keys.
    (Case(None, queries=1), DOUBLE),
    (Case(PACKED, 0, queries=30), DOUBLE),
    (Case(PACKED, 9, (3, 2), queries=30), DOUBLE),
    (Case(PACKED, None, 4, queries=1), DOUBLE),
    # Groups of heads, and dtypes.
    (Case(PACKED, 11, heads=(4, 4, 8)), torch.float32),
    (Case(PACKED, None, (1, 4), heads=(5, 1, 16)), torch.bfloat16),
    (Case(PACKED, None, 4, heads=(6, 2, 20)), torch.float32),
    # Rows shorter than the lag.
    *(
        (Case((documents,) * 2, None, lag, queries=5, keys=5), DOUBLE)
        for documents, lag in (
            (((0, 5),), (5, 7)),
            (((0, 3), (1, 2)), 4),
            (((0, 1), (1, 1), (2, 1), (-1, 2)), (5, 7)),
            (((-1, 5),), 4),
        )
    ),
]
OF_CHAINS = [
    *((Case(each, *how), DOUBLE) for each, how in zip(DOCUMENTS.values(), cycle([(None,), (1,), (21,)]), strict=False)),
    (Case(PACKED, 9, heads=(3, 3, 12)), torch.float32),
    (Case(PACKED, 9, heads=(4, 1, 12)), torch.float32),
    (Case(PACKED, 9), torch.bfloat16),
]


@pytest.mark.parametrize(("case", "dtype"), TEXTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_follow_the_rule(backend: str, case: Case, dtype: torch.dtype) -> None:
    check(backend, case, dtype)


@pytest.mark.parametrize(("case", "dtype"), OF_CHAINS)
@pytest.mark.parametrize(("backend", "steps"), [(EAGER, 2), (SDPA, 6), (PLAIN, 3), (FLASH, 3), (FLEX, 1)])
def test_chains_are_one_softmax(backend: str, steps: int, case: Case, dtype: torch.dtype) -> None:
    check(backend, Case(case.documents, case.window, heads=case.heads, steps=steps), dtype)


@pytest.mark.parametrize("documents", ["one", "packed"])
def test_the_merge_has_the_gradients_of_one_softmax(monkeypatch: pytest.MonkeyPatch, documents: str) -> None:
    """As behind flex_attention on a GPU, whose output and log-sum-exp both have gradients: here plain autograd's."""

    def part(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float) -> tuple[Tensor, Tensor]:
        first, last = visibility.bounds_BS(LENGTH, LENGTH, q.device)
        j = torch.arange(LENGTH)
        hidden = ((j < first[..., None]) | (j > last[..., None]))[:, None]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * scale).masked_fill(hidden, -1e30)
        is_blind = hidden.all(-1, keepdim=True)
        seen = scores.softmax(-1).masked_fill(is_blind, 0.0) @ v
        return seen, scores.logsumexp(-1).masked_fill(is_blind[..., 0], -torch.inf)

    monkeypatch.setattr(flex, "attend_text", part)
    for window, steps in ((None, 1), (6, 3)):
        check(FLEX, Case(DOCUMENTS[documents], window, steps=steps), trains=True)


@pytest.mark.parametrize("backend", [AUTO, *TRAINS])
def test_gradients_that_are_one_number_and_tensors_that_lie_anyhow(backend: str) -> None:
    case = Case(PACKED, 9, steps=2)
    everything = case.tensors()[:-1]
    given = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in everything]
    out, wanted = attended(backend, case, given), attended(EAGER, case, [x.requires_grad_() for x in everything])
    gradients, own = torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), everything)
    torch.testing.assert_close((out, gradients), (wanted, own), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", [*BACKENDS, PLAIN])
def test_one_visibility_serves_calls_of_many_shapes(backend: str) -> None:
    """What is made once belongs to its shape and window, and serves forwards and backwards of several dtypes and steps."""
    lags = {"lag": (1, 4)} if backend != PLAIN else {}
    shared, chain = Case(PACKED, **lags).visibility(), Case(PACKED, 9).visibility()
    for queries, window in ((LENGTH, None), (LENGTH, 9), (7, None), (7, 9), (LENGTH, None)):
        check(backend, Case(PACKED, window, queries=queries, **lags), visibility=shared.windowed(window))
    for steps, dtype in ((1, DOUBLE), (2, torch.float32), (2, DOUBLE)):
        check(backend, Case(PACKED, 9, steps=steps), dtype, chain)
    assert shared.windowed(9) is shared.windowed(9)
    assert shared.windowed(None) is shared


def test_the_first_tokens_of_a_row_are_a_row() -> None:
    whole = Case(PACKED, 9, (1, 4))
    q, k, v, _ = whole.tensors()
    for keys in (5, 24, 66):
        part = (x[:, :, :keys] for x in (q, k, v))
        out = attend(*part, whole.visibility().first(keys), 12**-0.5, SDPA)
        torch.testing.assert_close(out, expected(whole)[0][:, :, :keys], rtol=1e-12, atol=1e-12)
