"""What the backends hold at long rows: no tensor grows with the square of the row.

Shapes: S queries, T keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspec.models.attention import flash, flex, sdpa
from longspec.models.attention.backends import FLASH, SDPA, attend
from longspec.models.attention.visibility import Visibility
from tests.eager import EAGER
from tests.models.test_attention import DOCUMENTS, LAGS, LENGTH, Case

ROW = 8192
HEADS, KV_HEADS, WIDTH = 2, 1, 8


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = (x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(made) if isinstance(x, torch.Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return made


@contextmanager
def bytes_kept() -> Iterator[dict[int, int]]:
    """Bytes of each storage that is kept for the backward pass."""
    kept: dict[int, int] = {}
    alive = []  # else a freed tensor's address may come back

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


def lengths(documents: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]


VISIBILITIES = {
    "window": Visibility(window=512),
    "window in documents": Visibility(window=512, document_ids_BT=lengths([1000, 7000, 192])),
    "lag": Visibility(lag_B=torch.tensor([3])),
    "blocks": Visibility(lag_blocks=4),
    "blocks in documents": Visibility(lag_blocks=4, document_ids_BT=lengths([8000, 192])),
}


@pytest.mark.parametrize("name", sorted(VISIBILITIES))
def test_sdpa_holds_nothing_of_the_square(name: str) -> None:
    q, k, v = (torch.randn(1, heads, ROW, WIDTH, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with Largest() as largest:
        with bytes_kept() as kept:
            out = attend(q, k, v, VISIBILITIES[name], 1.0, SDPA)
        out.sum().backward()
    # A block's mask, with a row for each head of a group.
    assert largest.elements <= HEADS // KV_HEADS * sdpa.QUERY_BLOCK * ROW < ROW * ROW // 8
    # q, k, v, the output and its parts; kept masks of all blocks would be 32 MB and more.
    assert sum(kept.values()) < 20 * q.nbytes


@pytest.mark.parametrize("keys", [ROW, ROW + 1000])
def test_sdpa_without_gradients_drops_each_mask(keys: int) -> None:
    """A chunk of queries at the end of a longer cache."""
    q, k, v = (torch.randn(1, 1, length, WIDTH) for length in (4096, keys, keys))
    with torch.inference_mode(), Largest() as largest:
        attend(q, k, v, Visibility(), 1.0, SDPA)
    assert largest.elements <= sdpa.QUERY_BLOCK * keys


@pytest.mark.parametrize("name", sorted(VISIBILITIES))
def test_flex_block_mask_holds_nothing_of_the_square(name: str) -> None:
    with Largest() as largest:
        flex.block_mask(VISIBILITIES[name], 1, ROW, ROW, torch.device("cpu"))
    assert largest.elements <= 4 * ROW


def test_flash_plan_holds_nothing_of_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    package = SimpleNamespace(flash_attn_varlen_func=lambda q, *_, **__: seen.append(q.shape) or q)
    monkeypatch.setattr(flash, "package", lambda: package)
    q, k, v = (torch.randn(1, heads, ROW, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for visibility in VISIBILITIES.values():
        with Largest() as largest:
            attend(q, k, v, visibility, 1.0, FLASH)
        assert largest.elements <= q.numel()
    assert len(seen) == 3 + 2 * 4  # one call each, and one for each place in a block of 4


@pytest.mark.parametrize("queries", [LENGTH, 30])
@pytest.mark.parametrize("lag", sorted(LAGS))
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("documents", sorted(DOCUMENTS))
def test_flex_visits_the_blocks_it_must_and_no_other(
    monkeypatch: pytest.MonkeyPatch, documents: str, window: int | None, lag: str, queries: int
) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    case = Case(DOCUMENTS[documents], window, LAGS[lag], queries=queries)
    mask = flex.block_mask(case.visibility(), 2, queries, LENGTH, torch.device("cpu"))
    for row in range(2):
        seen_ST = case.seen_ST(row)
        tiles = [part.split(16, dim=1) for part in seen_ST.split(16, dim=0)]
        whole = [[j for j, tile in enumerate(tiles_of) if tile.shape[1] == 16 and tile.all()] for tiles_of in tiles]
        any_seen = [[j for j, tile in enumerate(tiles_of) if tile.any()] for tiles_of in tiles]
        assert listed(mask.full_kv_num_blocks, mask.full_kv_indices, row) == whole
        both = zip(listed(mask.kv_num_blocks, mask.kv_indices, row), whole, strict=True)
        assert [sorted(part + full) for part, full in both] == any_seen


def listed(counts: torch.Tensor, indices: torch.Tensor, row: int) -> list[list[int]]:
    return [numbers[:count].tolist() for count, numbers in zip(counts[row, 0], indices[row, 0], strict=True)]


@pytest.mark.parametrize("length", [700, 1500])
@pytest.mark.parametrize("name", ["window", "blocks"])
def test_sdpa_blocks_of_their_real_size_are_eager(name: str, length: int) -> None:
    inputs = [torch.randn(1, heads, length, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *qkv, grad = inputs
    results = []
    for backend in (SDPA, EAGER):
        given = [x.clone().requires_grad_() for x in qkv]
        out = attend(*given, VISIBILITIES[name], 0.3, backend)
        results.append([out, *torch.autograd.grad(out, given, grad)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
