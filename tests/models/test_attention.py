"""Every attention backend against the published rule, written out pair by pair.

Shapes: B rows, N query heads, K key/value heads, S queries, T keys, D head width.
"""

from dataclasses import dataclass
from functools import cache
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from longspec.models.attention import flex, sdpa
from longspec.models.attention.backends import FLASH, FLEX, SDPA, attend
from longspec.models.attention.visibility import Visibility
from tests.eager import EAGER
from tests.reference import attention

LENGTH = 70
DOCUMENTS = {
    "one": None,
    "packed": (((0, 23), (1, 1), (2, 41), (-1, 5)), ((0, 3), (1, 2), (2, 65))),
    "alike": (((4, 30), (5, 40)),) * 2,
}
LAGS: dict[str, tuple[int, int] | int | None] = {"none": None, "same": (2, 2), "differs": (1, 4), "long": (0, 33), "blocks": 4}
BACKENDS = (EAGER, SDPA, FLASH, FLEX)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """What one call is given."""

    documents: tuple[tuple[tuple[int, int], ...], ...] | None  # (id, length) of each row's runs
    window: int | None
    lag: tuple[int, int] | int | None  # of each row, or the size of blocks
    queries: int = LENGTH
    keys: int = LENGTH
    heads: tuple[int, int, int] = (4, 2, 12)

    def ids_BT(self) -> Tensor | None:
        if self.documents is None:
            return None
        return torch.tensor([[number for number, length in row for _ in range(length)] for row in self.documents])

    def visibility(self) -> Visibility:
        if isinstance(self.lag, int):
            return Visibility(window=self.window, lag_blocks=self.lag, document_ids_BT=self.ids_BT())
        lag_B = None if self.lag is None else torch.tensor(self.lag)
        return Visibility(window=self.window, lag_B=lag_B, document_ids_BT=self.ids_BT())

    def seen_ST(self, row: int) -> Tensor:
        return pair_by_pair(self, row)

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """q, k, v and a gradient of the output."""
        draw = torch.Generator().manual_seed(1)
        heads, kv_heads, width = self.heads
        shapes = [(heads, self.queries), (kv_heads, self.keys), (kv_heads, self.keys), (heads, self.queries)]
        return [torch.randn(2, *shape, width, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@cache
def pair_by_pair(case: Case, row: int) -> Tensor:
    """The published rule: whether query s sees key t, [S, T]."""
    runs = ((0, case.keys),) if case.documents is None else case.documents[row]
    run_of = [(number, start) for number, start, length in with_starts(runs) for _ in range(length)]
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


def with_starts(runs: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    return [(number, sum(length for _, length in runs[:place]), length) for place, (number, length) in enumerate(runs)]


@cache
def expected(case: Case) -> list[Tensor]:
    """Output [B, N, S, D] and gradients of q, k, v, in float64, row by row with dense masks."""
    q, k, v, grad = case.tensors()
    for x in (q, k, v):
        x.requires_grad_()
    rows = [attention(q[row], k[row], v[row], case.seen_ST(row)).unflatten(1, (q.shape[1], -1)) for row in range(2)]
    out = torch.stack(rows).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def check(backend: str, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Same output and gradients as the rule; exact zeros where a query sees nothing."""
    q, k, v, grad = case.tensors(dtype)
    trains = backend != FLEX  # no backward on a CPU
    for x in (q, k, v):
        x.requires_grad_(trains)
    out = attend(q, k, v, case.visibility(), case.heads[2] ** -0.5, backend)
    assert out.dtype == dtype
    wanted = expected(case)
    got = [out, *torch.autograd.grad(out, (q, k, v), grad)] if trains else [out]
    for left, right in zip(got, wanted, strict=False):
        torch.testing.assert_close(left.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(2):
        blind_S = ~case.seen_ST(row).any(-1)
        assert not out[row, :, blind_S].any()
        assert not trains or not got[1][row, :, blind_S].any()


@pytest.fixture(autouse=True)
def small_blocks_and_stand_ins(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than the rows, flash-attn's stand-in, and flex_attention without its minute of compiling."""
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 16)
    monkeypatch.setattr(flex, "BLOCK", 16)


@pytest.mark.parametrize(("kept", "window"), list(zip(product(DOCUMENTS, LAGS), cycle([None, 20]), strict=False)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_follow_the_rule(backend: str, kept: tuple[str, str], window: int | None) -> None:
    documents, lag = kept
    check(backend, Case(DOCUMENTS[documents], window, LAGS[lag]))


@pytest.mark.parametrize(
    ("documents", "window", "lag", "queries"),
    [("one", None, None, 1), ("packed", 0, None, 30), ("packed", 9, (3, 2), 30), ("packed", None, 4, 1)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_may_stand_at_the_end_of_more_keys(
    backend: str, documents: str, window: int | None, lag: tuple[int, int] | int | None, queries: int
) -> None:
    check(backend, Case(DOCUMENTS[documents], window, lag, queries=queries))


@pytest.mark.parametrize(
    ("heads", "dtype", "window", "lag"),
    [
        ((4, 4, 8), torch.float32, 11, None),
        ((5, 1, 16), torch.bfloat16, None, (1, 4)),
        ((6, 2, 20), torch.float32, None, 4),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_groups_and_dtypes(
    backend: str, window: int | None, lag: tuple[int, int] | int | None, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    check(backend, Case(DOCUMENTS["packed"], window, lag, heads=heads), dtype)


@pytest.mark.parametrize(
    ("documents", "lag"),
    [(((0, 5),), (5, 7)), (((0, 3), (1, 2)), 4), (((0, 1), (1, 1), (2, 1), (-1, 2)), (5, 7)), (((-1, 5),), 4)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_shorter_than_the_lag_see_nothing(
    backend: str, lag: tuple[int, int] | int, documents: tuple[tuple[int, int], ...]
) -> None:
    case = Case((documents,) * 2, None, lag, queries=5, keys=5)
    check(backend, case)
    if isinstance(lag, tuple):
        assert not case.seen_ST(0).any()


def test_one_visibility_serves_calls_of_many_shapes() -> None:
    """What is made once belongs to its shape and window."""
    case = Case(DOCUMENTS["packed"], None, (1, 4))
    shared = case.visibility()
    for backend in BACKENDS:
        for queries, window in ((LENGTH, None), (LENGTH, 9), (7, None), (7, 9), (LENGTH, None)):
            this = Case(DOCUMENTS["packed"], window, (1, 4), queries=queries)
            q, k, v, _ = this.tensors()
            out = attend(q, k, v, shared.windowed(window), 12**-0.5, backend)
            torch.testing.assert_close(out, expected(this)[0], rtol=1e-12, atol=1e-12)
    assert shared.windowed(9) is shared.windowed(9)
    assert shared.windowed(None) is shared


def test_the_first_tokens_of_a_row_are_a_row() -> None:
    whole = Case(DOCUMENTS["packed"], 9, (1, 4))
    q, k, v, _ = whole.tensors()
    for keys in (5, 24, 66):
        part = (x[:, :, :keys] for x in (q, k, v))
        out = attend(*part, whole.visibility().first(keys), 12**-0.5, SDPA)
        torch.testing.assert_close(out, expected(whole)[0][:, :, :keys], rtol=1e-12, atol=1e-12)
