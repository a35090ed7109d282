"""Attention of chains is one dense softmax over the text's keys and the chain's own, in values and in every gradient.

Shapes: B rows, N query heads, K key/value heads, S chains, J own keys, D head width.
"""

from dataclasses import dataclass
from functools import cache
from itertools import cycle, pairwise, product

import pytest
import torch
from torch import Tensor

from longspec.models.attention import chains, flash, flex, sdpa
from longspec.models.attention.backends import AUTO, FLASH, FLEX, SDPA
from longspec.models.attention.chains import attend_chains
from longspec.models.attention.visibility import Visibility
from tests.eager import EAGER
from tests.largest import Largest

LENGTH, WIDTH, SCALE = 41, 12, 0.4
DOCUMENTS: dict[str, tuple[tuple[tuple[int, int], ...], ...] | None] = {
    "one": None,
    "packed": (((0, 23), (1, 1), (2, 11), (-1, 6)), ((0, 2), (1, 1), (2, 38))),
    "alike": (((3, 17), (4, 24)),) * 2,
    "padding": (((-1, 41),), ((0, 41),)),
    "nothing": (((-1, 41),),) * 2,
}
PLAIN = "plain blocks"  # sdpa as it is on a GPU
TRAINS = (EAGER, SDPA, PLAIN, FLASH)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """What one step is given."""

    documents: str = "packed"
    window: int | None = None
    steps: int = 2
    heads: tuple[int, int] = (4, 2)

    def ids_BS(self) -> Tensor | None:
        rows = DOCUMENTS[self.documents]
        if rows is None:
            return None
        return torch.tensor([[number for number, length in row for _ in range(length)] for row in rows])

    def visibility(self) -> Visibility:
        return Visibility(window=self.window, document_ids_BT=self.ids_BS())

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
        """Queries, the text's keys and values, those of each step; and a gradient of the output."""
        draw = torch.Generator().manual_seed(self.steps)
        query_heads, key_heads = self.heads
        made = [
            torch.randn(2, heads, LENGTH, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
            for heads in (query_heads, *(key_heads,) * 2 * (1 + self.steps), query_heads)
        ]
        return made[:-1], made[-1]


@cache
def expected(case: Case) -> list[Tensor]:
    """Output and gradients by one softmax over S + J * S keys, of which a chain sees what the rule says, pair by pair."""
    (q, *pairs), grad = case.tensors()
    for x in (q, *pairs):
        x.requires_grad_()
    ids_BS, group = case.ids_BS(), case.heads[0] // case.heads[1]
    rows = []
    for row in range(2):
        ids = [0] * LENGTH if ids_BS is None else ids_BS[row].tolist()
        edges = [0, *(t for t in range(1, LENGTH) if ids[t] != ids[t - 1]), LENGTH]
        start_of = [start for start, stop in pairwise(edges) for _ in range(start, stop)]
        seen = torch.zeros(LENGTH, LENGTH * (1 + case.steps), dtype=torch.bool)
        for t in range(LENGTH):
            near = 0 if case.window is None else t - case.window
            seen[t, max(near, start_of[t]) : t + 1] = True
            seen[t, LENGTH + t :: LENGTH] = True
            seen[t] &= ids[t] != -1
        keys, values = (torch.cat([x[row].repeat_interleave(group, 0) for x in some], 1) for some in (pairs[::2], pairs[1::2]))
        scores = (q[row] @ keys.transpose(1, 2) * SCALE).masked_fill(~seen, -1e30)
        rows.append(scores.softmax(-1).masked_fill(~seen, 0.0) @ values)
    out = torch.stack(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, *pairs), grad)]


def attend(case: Case, everything: list[Tensor], backend: str, visibility: Visibility | None = None) -> Tensor:
    q, *pairs = everything
    text, *own = zip(pairs[::2], pairs[1::2], strict=True)
    return attend_chains(q, text, own, visibility or case.visibility(), SCALE, SDPA if backend == PLAIN else backend)


def check(case: Case, backend: str, dtype: torch.dtype = torch.float64) -> None:
    everything, grad = case.tensors(dtype)
    for x in everything:
        x.requires_grad_(backend != FLEX)  # no backward on a CPU
    out = attend(case, everything, backend)
    got = [out] if backend == FLEX else [out, *torch.autograd.grad(out, everything, grad)]
    assert all(x.dtype == dtype for x in got)
    for left, right in zip(got, expected(case), strict=backend != FLEX):
        torch.testing.assert_close(left.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if (ids_BS := case.ids_BS()) is not None:
        is_padding = (ids_BS == -1)[:, None, :, None]
        assert not any(x.masked_select(is_padding).any() for x in got)


@pytest.fixture(autouse=True)
def small_blocks_and_stand_ins(stand_ins: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Blocks smaller than the rows, flash-attn's stand-ins, flex_attention uncompiled, and sdpa as on a GPU where asked for."""
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 8)
    monkeypatch.setattr(chains, "BLOCK", {"cpu": 2 * 4 * WIDTH * 16})
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == PLAIN:
        monkeypatch.setattr(sdpa, "KERNEL_DEVICE", "none")


STEPS = cycle([(None, 6), (1, 6), (21, 0)])  # windows, and steps of a chain
DENSE = [(*each, *steps) for each, steps in zip(product([*TRAINS, FLEX], DOCUMENTS), STEPS, strict=False)]


@pytest.mark.parametrize(("backend", "documents", "window", "steps"), DENSE)
def test_one_dense_softmax(backend: str, documents: str, window: int | None, steps: int) -> None:
    check(Case(documents, window, steps), backend)


@pytest.mark.parametrize(("heads", "dtype"), [((3, 3), torch.float32), ((4, 1), torch.float32), ((4, 2), torch.bfloat16)])
@pytest.mark.parametrize("backend", [*TRAINS, FLEX])
def test_head_groups_and_dtypes(backend: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(Case("packed", 9, 3, heads), backend, dtype)


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
        case = Case(documents, window, steps)
        everything, grad = case.tensors()
        for x in everything:
            x.requires_grad_()
        out = attend(case, everything, FLEX)
        for left, right in zip([out, *torch.autograd.grad(out, everything, grad)], expected(case), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", [AUTO, *TRAINS])
def test_gradients_that_are_one_number_and_tensors_that_lie_anyhow(backend: str) -> None:
    case = Case("packed", 9, 2)
    everything, _ = case.tensors()
    given = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in everything]
    out = attend(case, given, backend)
    wanted = attend(case, [x.requires_grad_() for x in everything], EAGER)
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-11)
    for left, right in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), everything), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", [SDPA, PLAIN, FLASH])
def test_steps_may_share_a_visibility(backend: str) -> None:
    """What is made once belongs to its dtype and serves forwards and backwards of several steps."""
    shared = Case("packed", 9).visibility()
    for steps, dtype in ((0, torch.float64), (2, torch.float32), (2, torch.float64)):
        case = Case("packed", 9, steps)
        everything, grad = case.tensors(dtype)
        for x in everything:
            x.requires_grad_()
        out = attend(case, everything, backend, shared)
        for left, right in zip([out, *torch.autograd.grad(out, everything, grad)], expected(case), strict=True):
            torch.testing.assert_close(left.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("backend", "window"), [(SDPA, None), (PLAIN, 300)])
def test_nothing_grows_with_the_square(monkeypatch: pytest.MonkeyPatch, backend: str, window: int | None) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 256)
    length, heads, width = 1500, 2, 8
    ids_BS = torch.repeat_interleave(torch.arange(2), torch.tensor([1200, 300]))[None]
    for documents in (None, ids_BS):
        q, *pairs = (torch.randn(1, number, length, width, requires_grad=True) for number in (heads, 1, 1, 1, 1))
        with Largest() as largest:
            own = [(pairs[2], pairs[3])]
            visibility = Visibility(window=window, document_ids_BT=documents)
            attend_chains(q, (pairs[0], pairs[1]), own, visibility, SCALE, SDPA).sum().backward()
        # Without a kernel all scores of a block of queries.
        block = heads * 256 * (length if window is None else 256 + window) if backend == PLAIN else 256 * (256 + 300)
        assert largest.elements <= max(block, q.numel()) < length * length


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("backend", [SDPA, FLASH, FLEX])
def test_output_and_gradients_on_a_gpu(monkeypatch: pytest.MonkeyPatch, backend: str, window: int | None) -> None:
    monkeypatch.undo()
    if backend == FLASH and not flash.is_installed():
        pytest.skip("flash-attn is not installed")
    draw = torch.Generator().manual_seed(1)
    shapes = (8, 2, 2, 2, 2, 2, 2, 8)
    drawn = [torch.randn(2, heads, 700, 64, generator=draw).to("cuda", torch.bfloat16) for heads in shapes]
    numbers = torch.tensor([0, 1, 2, -1])
    rows = [torch.repeat_interleave(numbers, torch.tensor(row)) for row in ((300, 1, 350, 49), (40, 500, 100, 60))]
    visibility = Visibility(window=window, document_ids_BT=torch.stack(rows).cuda())
    results = []
    for chosen, dtype in ((backend, torch.bfloat16), (EAGER, torch.float64)):
        *everything, grad = (x.to(dtype) for x in drawn)
        for x in everything:
            x.requires_grad_()
        q, *pairs = everything
        text, *own = zip(pairs[::2], pairs[1::2], strict=True)
        out = attend_chains(q, text, own, visibility, 0.125, chosen)
        results.append([out, *torch.autograd.grad(out, everything, grad)])
    for left, right in zip(*results, strict=True):
        assert (left.double() - right).norm() <= 0.01 * right.norm()
