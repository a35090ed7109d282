"""Tree attention in parts is tree attention with one mask, and both are attention over each node's own path."""

import pytest
import torch
from torch import Tensor

from longspec.models.attention import flash
from longspec.models.attention.backends import FLASH, SDPA, attend
from longspec.models.attention.visibility import TreeVisibility
from tests.models.flash_stand_in import flash_attn_with_kvcache

HEADS, GROUPS, WIDTH, SCALE = 2, 3, 16, 0.3
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 3]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6], [0, 2, 5, 7]]
ROWS = [(40,), (300, 7, 0, 128), (9, 9, 4), (0, 0)]


def tree_case(
    lengths: tuple[int, ...], dtype: torch.dtype, window: int | None = None, device: str = "cpu", *, tree: bool = True
) -> tuple[Tensor, Tensor, Tensor, TreeVisibility]:
    """Queries, keys, values and what is seen; behind the shorter rows lie numbers nobody may read."""
    torch.manual_seed(0)
    rows, nodes, prefix = len(lengths), len(PATHS), max(lengths)
    keys = prefix + nodes * tree
    q = torch.randn(rows, HEADS * GROUPS, nodes, WIDTH)
    k, v = (torch.randn(rows, HEADS, keys, WIDTH) for _ in range(2))
    seen_SS = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node, path in enumerate(PATHS):
        seen_SS[node, path] = True
    for row, length in enumerate(lengths):
        k[row, :, length:prefix], v[row, :, length:prefix] = 30.0, 1e3
    depths, seen_BSL = torch.tensor(DEPTHS, device=device), seen_SS.expand(rows, -1, -1)[:, :, : nodes * tree].to(device)
    own = TreeVisibility(lengths, torch.tensor(lengths, device=device), seen_BSL, depths, depths[: nodes * tree], window=window)
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), own


def by_hand(q: Tensor, k: Tensor, v: Tensor, visibility: TreeVisibility) -> Tensor:
    """Row by row and node by node: the softmax over the prefix and the node's path, in float64."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    seen, in_tree = torch.zeros_like(q), visibility.tree_BSL.shape[2]
    for row, length in enumerate(visibility.lengths):
        for node, path in enumerate(PATHS):
            places = [*range(length), *(k.shape[2] - in_tree + ancestor for ancestor in path if in_tree)]
            positions = torch.tensor([*range(length), *(length + DEPTHS[ancestor] for ancestor in path if in_tree)])
            back = length + DEPTHS[node] - positions
            near = back <= (1e9 if visibility.window is None else visibility.window)
            chosen = torch.tensor(places, dtype=torch.int64)[near]
            for head in range(HEADS * GROUPS) if len(chosen) else ():
                keys, values = k[row, head // GROUPS, chosen], v[row, head // GROUPS, chosen]
                seen[row, head, node] = (keys @ q[row, head, node] * SCALE).softmax(-1) @ values
    return seen


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("lengths", "window"), list(zip(ROWS, [None, 25, 25, None], strict=True)))
@pytest.mark.parametrize("backend", [SDPA, FLASH])
def test_each_node_attends_as_the_last_token_of_its_own_path(backend: str, lengths, window) -> None:
    case = tree_case(lengths, torch.float64, window)
    tolerance = 1e-5 if backend == FLASH else 1e-9  # the log-sum-exp of flash-attn is of float32
    torch.testing.assert_close(attend(*case, SCALE, backend), by_hand(*case), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [*ROWS, (1000, 999, 127)])
@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("backend", [FLASH, SDPA])
def test_parts_equal_one_mask_on_a_gpu(backend: str, lengths, window, dtype: torch.dtype) -> None:
    if backend == FLASH and (dtype == torch.float32 or not flash.is_installed()):
        pytest.skip("flash-attn is not installed, or does not take this dtype")
    for is_tree in (True, False):
        case = tree_case(lengths, dtype, window, "cuda", tree=is_tree)
        seen, wanted = attend(*case, SCALE, backend).cpu().double(), by_hand(*case)
        assert (seen - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.gpu
def test_the_stand_in_of_the_cache_kernel_is_flash_attn() -> None:
    if not flash.is_installed():
        pytest.skip("flash-attn is not installed")
    q, k, v, visibility = tree_case((200, 7, 0, 128), torch.bfloat16, device="cuda", tree=False)
    settings = {"softmax_scale": SCALE, "return_softmax_lse": True}
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    lengths_B = visibility.lengths_B.to(torch.int32)
    seen, log_sums, *_ = flash.package().flash_attn_with_kvcache(*arguments, cache_seqlens=lengths_B, **settings)
    wanted, wanted_log_sums = flash_attn_with_kvcache(*(x.cpu() for x in arguments), cache_seqlens=lengths_B.cpu(), **settings)
    torch.testing.assert_close(seen.cpu(), wanted, atol=2e-2, rtol=2e-2)
    there = visibility.lengths_B.cpu() > 0
    torch.testing.assert_close(log_sums.cpu()[there], wanted_log_sums[there], atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("stand_ins")
def test_no_mask_of_flash_attn_reaches_over_a_prefix_that_all_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor, with a window, over more than the window and the tree."""
    widest = []
    make = TreeVisibility.mask_BST
    monkeypatch.setattr(TreeVisibility, "mask_BST", lambda self, prefix: widest.append(prefix) or make(self, prefix))
    for window in (None, 5000, 30):
        attend(*tree_case((400, 390), torch.float32, window), SCALE, FLASH)
    assert widest == [40]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", [SDPA, FLASH])
def test_a_query_that_sees_nothing_gets_zeros(backend: str, window) -> None:
    """A draft's first node beside an empty cache, alone and in a batch."""
    for lengths in ((0,), (0, 5), (5, 0, 129)):
        case = tree_case(lengths, torch.float32, window, tree=False)
        seen = attend(*case, SCALE, backend)
        assert not seen[lengths.index(0)].any()
        torch.testing.assert_close(seen.double(), by_hand(*case), atol=1e-5, rtol=1e-5)
