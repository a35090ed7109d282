"""What the backends hold at long rows: no tensor grows with the square of the row.

Shapes: S queries, T keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch

from longspec.models.attention import flash, flex, sdpa
from longspec.models.attention.backends import FLASH, SDPA, attend
from longspec.models.attention.visibility import Visibility
from tests.largest import Largest
from tests.models.test_attention import DOCUMENTS, LAGS, LENGTH, Case

ROW = 8192
HEADS, KV_HEADS, WIDTH = 2, 1, 8


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


def test_sdpa_without_gradients_drops_each_mask() -> None:
    """A chunk of queries at the end of a longer cache."""
    keys = ROW + 1000
    q, k, v = (torch.randn(1, 1, length, WIDTH) for length in (4096, keys, keys))
    with torch.inference_mode(), Largest() as largest:
        attend(q, k, v, Visibility(), 1.0, SDPA)
    assert largest.elements <= sdpa.QUERY_BLOCK * keys


@pytest.mark.parametrize(("device", "window"), [("cpu", None), ("none", 300)])
def test_chains_hold_nothing_of_the_square(monkeypatch: pytest.MonkeyPatch, device: str, window: int | None) -> None:
    """device none: as where no kernel gives a log-sum-exp, so that all scores of a block of queries are made."""
    monkeypatch.setattr(sdpa, "KERNEL_DEVICE", device)
    length = 1500
    for documents in (None, lengths([1200, 300])):
        q, *pairs = (torch.randn(1, number, length, WIDTH, requires_grad=True) for number in (HEADS, 1, 1, 1, 1))
        with Largest() as largest:
            visibility = Visibility(window=window, document_ids_BT=documents)
            attend(q, pairs[0], pairs[1], visibility, 1.0, SDPA, own=[(pairs[2], pairs[3])]).sum().backward()
        block = 256 * (256 + 300) * (HEADS if device == "none" else 1)
        assert largest.elements <= max(block, q.numel()) < length * length


@pytest.mark.parametrize("name", sorted(VISIBILITIES))
def test_masks_of_flex_and_plans_of_flash_hold_nothing_of_the_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, heads, ROW, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with Largest() as largest:
        flex.text_mask(VISIBILITIES[name], q, k)
    assert largest.elements <= 4 * ROW
    package = SimpleNamespace(_flash_attn_varlen_forward=lambda q, *_, **__: (q, q[..., 0].T.float()))
    monkeypatch.setattr(flash, "package", lambda: package)
    if VISIBILITIES[name].lag_blocks is None:
        with Largest() as largest:
            attend(q, k, v, VISIBILITIES[name], 1.0, FLASH)
        assert largest.elements <= q.numel()


@pytest.mark.parametrize(("kept", "cut"), list(zip(product(DOCUMENTS, LAGS), cycle([(None, LENGTH), (20, 30)]), strict=False)))
def test_flex_visits_the_blocks_it_must_and_no_other(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[str, str], cut: tuple[int | None, int]
) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    (documents, lag), (window, queries) = kept, cut
    case = Case(DOCUMENTS[documents], window, LAGS[lag], queries=queries)
    mask = flex.text_mask(case.visibility(), torch.empty(2, 1, queries, 8), torch.empty(2, 1, LENGTH, 8))
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
