"""Tree attention in parts is tree attention with one mask, and both are attention over each node's own path."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from longspec.models.attention import flash, flex
from longspec.models.attention.backends import FLASH, FLEX, SDPA, attend
from longspec.models.attention.visibility import TreeVisibility
from tests.models import flash_stand_in
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


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's stand-in, and flex_attention uncompiled."""
    monkeypatch.setattr(flash, "package", lambda: flash_stand_in)
    monkeypatch.setattr(flex, "compiled", lambda dynamic: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("lengths", "window"), list(zip(ROWS, [None, 25, 25, None], strict=True)))
@pytest.mark.parametrize("backend", [SDPA, FLASH, FLEX])
def test_each_node_attends_as_the_last_token_of_its_own_path(backend: str, lengths, window) -> None:
    case = tree_case(lengths, torch.float64, window)
    tolerance = 1e-5 if backend == FLASH else 1e-9  # the log-sum-exp of flash-attn is of float32
    torch.testing.assert_close(attend(*case, SCALE, backend), by_hand(*case), atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("backend", [FLASH, FLEX])
def test_parts_equal_one_mask(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    *case, visibility = tree_case(ROWS[1], dtype)
    parts, masked = (attend(*case, visibility, SCALE, way) for way in (backend, SDPA))
    assert parts.dtype == dtype
    torch.testing.assert_close(parts, masked, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [*ROWS, (1000, 999, 127)])
@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("backend", [FLASH, FLEX, SDPA])
def test_parts_equal_one_mask_on_a_gpu(backend: str, lengths, window, dtype: torch.dtype) -> None:
    if backend == FLASH and (dtype == torch.float32 or not flash.is_installed()):
        pytest.skip("flash-attn is not installed, or does not take this dtype")
    for is_tree in (True, False):
        case = tree_case(lengths, dtype, window, "cuda", tree=is_tree)
        seen, wanted = attend(*case, SCALE, backend).cpu().double(), by_hand(*case)
        assert (seen - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.gpu
def test_flex_compiles_once_for_all_lengths_on_a_gpu() -> None:
    torch._dynamo.reset()
    for length in range(500, 560, 7):
        attend(*tree_case((length, 300), torch.bfloat16, device="cuda"), SCALE, FLEX)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


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


@pytest.mark.usefixtures("on_cpu")
def test_no_mask_of_flash_attn_reaches_over_a_prefix_that_all_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor, with a window, over more than the window and the tree."""
    widest = []
    make = TreeVisibility._mask
    monkeypatch.setattr(TreeVisibility, "_mask", lambda self, prefix: widest.append(prefix) or make(self, prefix))
    for window in (None, 5000, 30):
        attend(*tree_case((400, 390), torch.float32, window), SCALE, FLASH)
    assert widest == [40]


def test_blocks_of_the_prefix_need_no_look_at_keys_for_flex() -> None:
    """Of 300 + 8, 128 + 8, 7 + 8 and 0 + 8 keys: whole blocks of 128 first, then those that hold an end or the tree."""
    mask = flex.tree_block_mask(tree_case((300, 128, 7, 0), torch.float32)[3], 24, 308)
    assert mask.full_kv_num_blocks.flatten().tolist() == [2, 1, 0, 0]
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 2, 1]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", [SDPA, FLASH, FLEX])
def test_a_query_that_sees_nothing_gets_zeros(backend: str, window) -> None:
    """A draft's first node beside an empty cache, alone and in a batch."""
    for lengths in ((0,), (0, 5), (5, 0, 129)):
        case = tree_case(lengths, torch.float32, window, tree=False)
        seen = attend(*case, SCALE, backend)
        assert not seen[lengths.index(0)].any()
        torch.testing.assert_close(seen.double(), by_hand(*case), atol=1e-5, rtol=1e-5)
