"""Compiled kernels and the real flash-attn against eager; all but one need a CUDA GPU.

Shapes: B rows, N query heads, K key/value heads, S queries, T keys, D head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from longspec.models.attention import flash
from longspec.models.attention.backends import FLASH, FLEX, SDPA, attend
from longspec.models.attention.blocks import BlockVisibility
from longspec.models.attention.visibility import Visibility
from tests.eager import EAGER
from tests.models import flash_stand_in

ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in (FLASH, FLEX, SDPA)]
LENGTH, SCALE = 700, 0.125
DOCUMENTS = ((300, 1, 350, 49), (40, 500, 100, 60))  # the last of each row is padding


def ids_BT(device: str) -> Tensor:
    numbers = torch.tensor([0, 1, 2, -1])
    rows = [torch.repeat_interleave(numbers, torch.tensor(row)) for row in DOCUMENTS]
    return torch.stack(rows).to(device)


def visibilities(device: str) -> dict[str, Visibility]:
    documents, lag_B = ids_BT(device), torch.tensor([1, 4], device=device)
    return {
        "causal": Visibility(),
        "documents": Visibility(document_ids_BT=documents),
        "window": Visibility(window=130, document_ids_BT=documents),
        "lag": Visibility(lag_B=lag_B),
        "lag in documents": Visibility(lag_B=lag_B, document_ids_BT=documents),
        "blocks in documents": Visibility(lag_blocks=4, document_ids_BT=documents),
        "window and lag": Visibility(window=130, lag_B=lag_B),
    }


def tensors(device: str, dtype: torch.dtype, queries: int, width: int = 64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(10, queries), (2, LENGTH), (2, LENGTH), (10, queries)]
    return [torch.randn(2, *shape, width, generator=draw).to(device, dtype) for shape in shapes]


def need(backend: str) -> None:
    if backend == FLASH and not flash.is_installed():
        pytest.skip("flash-attn is not installed")


@contextmanager
def without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.slow
def test_flex_compiles_on_a_cpu_and_sees_what_sdpa_sees() -> None:
    """One kernel takes all bounds; test_attention.py has each kind of them, uncompiled."""
    q, k, v, _ = tensors("cpu", torch.float32, LENGTH)
    with torch.inference_mode():
        out, expected = (attend(q, k, v, visibilities("cpu")["lag in documents"], SCALE, backend) for backend in (FLEX, SDPA))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def compare(backend: str, given: list[Tensor], visibility: Visibility | BlockVisibility) -> None:
    """Output and gradients, of the drafts' own keys and values too, against eager's in float32; zeros stay zeros."""
    results = []
    for chosen, dtype in ((backend, torch.bfloat16), (EAGER, torch.float32)):
        *parts, grad = (x.detach().to(dtype).requires_grad_() for x in given)
        q, k, v, *own = parts
        with without_tf32():
            out = attend(q, k, v, visibility, SCALE, chosen, own=list(zip(own[::2], own[1::2], strict=True)))
            results.append([out, *torch.autograd.grad(out, parts, grad)])
    blind_BNSD = results[1][0] == 0
    assert not any(x[blind_BNSD].any() for x in results[0][:2])
    for left, right in zip(*results, strict=True):
        assert (left.float() - right).norm() <= 0.01 * right.norm()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", sorted(visibilities("cpu")))
@pytest.mark.parametrize("backend", ON_GPU)
def test_output_and_gradients_on_a_gpu(backend: str, name: str, width: int) -> None:
    need(backend)
    visibility = visibilities("cuda")[name]
    compare(backend, tensors("cuda", torch.bfloat16, LENGTH, width), visibility)
    if visibility.lag_B is None and visibility.lag_blocks is None:  # chains of two steps
        q, k, v, grad = tensors("cuda", torch.bfloat16, LENGTH, width)
        compare(backend, [q, k, v, *(torch.randn_like(k) for _ in range(4)), grad], visibility)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("backend", [pytest.param(name, marks=pytest.mark.gpu) for name in (FLEX, SDPA)])
def test_drafted_blocks_on_a_gpu(backend: str, window: int | None) -> None:
    """Blocks of 16 slots at 30 places of a text, in documents; more queries and keys than whole blocks of a kernel."""
    anchors_BA = torch.randint(0, LENGTH, (2, 30), generator=torch.Generator().manual_seed(2)).sort(1).values.cuda()
    shapes = [(10, 480), (2, LENGTH), (2, LENGTH), (2, 480), (2, 480), (10, 480)]
    given = [torch.randn(2, *shape, 64, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    compare(backend, given, BlockVisibility(anchors_BA, anchors_BA // 300 * 300, 16, window=window))


@pytest.mark.gpu
def test_the_stand_in_is_flash_attn() -> None:
    need(FLASH)
    q, k, v = (torch.randn(50, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (6, 2, 2))
    edges_q, edges_k = (torch.tensor(edges, dtype=torch.int32) for edges in ([0, 7, 50], [0, 20, 50]))
    for window in (-1, 5, 0):
        call = flash.Call(None, None, edges_q, edges_k, 43, 30, (window, min(window, 0)))
        arguments = flash._arguments(call, 0.3)
        on_gpu = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        real = flash.package()._flash_attn_varlen_forward(q, k, v, **on_gpu)
        ours = flash_stand_in._flash_attn_varlen_forward(*(x.cpu().float() for x in (q, k, v)), **arguments)
        for left, right in zip(real[:2], ours[:2], strict=True):
            seen = right.isfinite()
            assert (left.cpu().float() - right)[seen].norm() <= 0.01 * right[seen].norm()


@pytest.mark.parametrize("backend", ON_GPU)
def test_32k_tokens_fit_on_a_gpu(backend: str) -> None:
    """A boolean mask of 32k x 32k alone would be 1 GB.

    flash-attn's deterministic backward keeps the queries' gradient in float32 once for each multiprocessor, over the heads.
    """
    need(backend)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    bound = 400 * 2**20 + (4 * processors * 32768 * 64 if backend == FLASH else 0)
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor([20000, 12768])).cuda()[None]
    sees = (Visibility(window=512, document_ids_BT=rows), Visibility(lag_B=torch.tensor([3]).cuda()), Visibility(lag_blocks=4))
    for visibility in sees:
        q, k, v = (torch.randn(1, heads, 32768, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        for x in (q, k, v):
            x.requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attend(q, k, v, visibility, SCALE, backend)
        assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
        out.sum().backward()
        assert torch.cuda.max_memory_allocated() - before < bound
