"""Attention of drafted blocks against one softmax with an explicit mask, by every backend.

Shapes: B rows, A blocks, W slots, Q = A W queries, S keys of the text, N query heads, K key/value heads, D head width.
"""

import pytest
import torch
from torch import Tensor

from longspec.models.attention import backends, flex, sdpa
from longspec.models.attention.backends import FLEX, SDPA
from longspec.models.attention.blocks import BlockVisibility, chunks_of

S, W, N, K, D = 50, 5, 4, 2, 16
ANCHORS = torch.tensor([[0, 3, 17, 18, 30, 44, 49], [9, 12, 13, 14, 20, 33, 0]])  # the last block of row 1 fills it up
STARTS = torch.tensor([[0, 0, 11, 11, 30, 31, 31], [9, 9, 9, 9, 9, 31, 0]])


@pytest.fixture(autouse=True)
def small(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and blocks of masks smaller than a row; flex_attention without its minute of compiling."""
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 12)
    monkeypatch.setattr(flex, "BLOCK", 16)


def tensors(dtype: torch.dtype, needs_gradient: bool) -> list[Tensor]:
    """Queries, the text's keys and values, the blocks'."""
    torch.manual_seed(0)
    queries = ANCHORS.shape[1] * W
    shapes = [(2, N, queries, D), *[(2, K, S, D)] * 2, *[(2, K, queries, D)] * 2]
    return [torch.randn(shape, dtype=dtype, requires_grad=needs_gradient) for shape in shapes]


def seen(window: int | None) -> Tensor:
    """The mask [B, Q, S + Q], pair by pair."""
    queries = ANCHORS.shape[1] * W
    seen_BQT = torch.zeros(2, queries, S + queries, dtype=torch.bool)
    for row in range(2):
        for query in range(queries):
            block, slot = divmod(query, W)
            anchor, start = int(ANCHORS[row, block]), int(STARTS[row, block])
            for key in range(start, anchor):
                seen_BQT[row, query, key] = window is None or anchor + slot - key <= window
            for other in range(W):
                seen_BQT[row, query, S + block * W + other] = window is None or 0 <= slot - other <= window
    return seen_BQT


def dense(given: list[Tensor], window: int | None) -> Tensor:
    q_BNQD, k_text, v_text, k_own, v_own = given
    keys, values = (torch.cat(each, dim=2).repeat_interleave(N // K, 1) for each in ((k_text, k_own), (v_text, v_own)))
    scores_BNQT = q_BNQD @ keys.transpose(2, 3) * 0.3
    return scores_BNQT.masked_fill(~seen(window)[:, None], -torch.inf).softmax(-1) @ values


def attend(given: list[Tensor], window: int | None, backend: str) -> Tensor:
    visibility = BlockVisibility(ANCHORS, STARTS, W, window=window)
    return backends.attend(*given[:3], visibility, 0.3, backend, own=[(given[3], given[4])])


@pytest.mark.parametrize("window", [None, 6, 20])
@pytest.mark.parametrize("kernel", ["cpu", "none"])
def test_chunks_are_one_softmax_with_its_gradients(window: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kernel none: by all scores of a chunk, as on a GPU without compiled kernels."""
    monkeypatch.setattr(sdpa, "KERNEL_DEVICE", kernel)
    given = tensors(torch.float64, True)
    got, wanted = attend(given, window, SDPA), dense(given, window)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(wanted)
    gradients = (torch.autograd.grad((x * weight).sum(), given) for x in (got, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 6, 20])
def test_flex_attention_is_the_same_softmax(window: int | None) -> None:
    given = tensors(torch.float32, False)
    torch.testing.assert_close(attend(given, window, FLEX), dense(given, window), rtol=1e-5, atol=1e-5)


def test_no_chunk_is_larger_than_its_blocks_and_their_text() -> None:
    """A chunk's keys of the text end before its last anchor, and begin where its first document or window does."""
    queries = torch.empty(2, N, ANCHORS.shape[1] * W, D)
    chunks = chunks_of(queries, torch.empty(2, K, S + queries.shape[2], D), BlockVisibility(ANCHORS, STARTS, W, window=6))[:4]
    assert [(chunk.row, chunk.queries) for chunk in chunks] == [(0, slice(W * at, W * min(at + 2, 7))) for at in (0, 2, 4, 6)]
    spans = [range(0, 3), range(11, 18), range(30, 44), range(43, 49)]
    own = [range(S + chunk.queries.start, S + chunk.queries.stop) for chunk in chunks]
    assert [chunk.keys.tolist() for chunk in chunks] == [[*text, *after] for text, after in zip(spans, own, strict=True)]
