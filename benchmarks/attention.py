"""Time and memory of the attention backends, forward and backward, as ratios to ours in one run.

    python benchmarks/attention.py                  on this machine's CPU, or its GPU when there is one
    python benchmarks/attention.py --lengths 32768  other row lengths; a second call measures what is missing

Compared with ours (sdpa in blocks; on a GPU flash_attention_2 and flex_attention too, when they are there): eager, and
scaled_dot_product_attention with the whole mask. The result is kept in benchmarks/results/attention_{device}.jsonl,
a line for each way.

Shapes: B rows, N query heads, K key/value heads, S tokens, D head width.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models.attention import flash
from longspec.models.attention.backends import FLASH, FLEX, SDPA, attend
from longspec.models.attention.visibility import Visibility

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.cells import fill
from tests.eager import EAGER

OURS, FULL_MASK = SDPA, "sdpa, whole mask"
RESULTS = Path(__file__).parent / "results"
HEADS = {"cpu": (8, 2, 64), "cuda": (40, 8, 128)}  # a small draft's, QwQ-32B's
LENGTHS = {"cpu": (1024, 2048, 4096, 8192), "cuda": (1024, 4096, 8192, 32768)}
LARGEST = {FULL_MASK: 8192, EAGER: 4096}  # tokens; both hold squares, eager one for each head
REPEATS = 3


def visibilities(length: int, device: str) -> dict[str, Visibility]:
    """What a training step attends to: the draft's own window, the target's lagged keys, packed documents."""
    lag_B = torch.tensor([3], device=device)
    document_ids_BS = torch.arange(length, device=device)[None] // (length // 4)
    return {
        "causal": Visibility(),
        "window 512": Visibility(window=512),
        "lag 3": Visibility(lag_B=lag_B),
        "lag 3, four documents": Visibility(lag_B=lag_B, document_ids_BT=document_ids_BS),
        "blocks of 4": Visibility(lag_blocks=4),
    }


def attend_with_whole_mask(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """The straightforward way: one call with a mask of all pairs."""
    length = q_BNSD.shape[2]
    first_BS, last_BS = visibility.bounds_BS(length, length, q_BNSD.device)
    index_S = torch.arange(length, device=q_BNSD.device)
    seen_B1SS = ((index_S >= first_BS[..., None]) & (index_S <= last_BS[..., None]))[:, None]
    return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, attn_mask=seen_B1SS, scale=scale, enable_gqa=True)


def ways(device: str, length: int) -> dict[str, Callable[..., Tensor]]:
    """What is compared at this length on this device."""
    names = [OURS, EAGER]
    if device == "cuda":
        names += [FLEX, *([FLASH] if flash.is_installed() else [])]
    chosen: dict[str, Callable[..., Tensor]] = {name: lambda *given, name=name: attend(*given, backend=name) for name in names}
    chosen[FULL_MASK] = attend_with_whole_mask
    return {name: way for name, way in chosen.items() if length <= LARGEST.get(name, length)}


def peak_bytes(device: str) -> int:
    """The most memory since the last reset: the allocator's on a GPU, the process's own on Linux."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def reset_peak(device: str) -> None:
    """Begin anew from what is held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the C library keeps would hide what is taken next
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def measure(way: Callable[..., Tensor], visibility: Callable[[], Visibility], length: int, device: str) -> dict[str, float]:
    """Best seconds and largest memory above the inputs of a forward and its backward; masks are made anew each time.

    On a CPU the seconds are the process's own, which what else runs there changes little.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time
    heads, kv_heads, width = HEADS[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, n, length, width, device=device, dtype=dtype, generator=draw) for n in (heads, kv_heads, kv_heads)
    )
    for x in (q, k, v):
        x.requires_grad_()
    seconds, peaks = [], []
    for _ in range(REPEATS + 1):  # the first one warms up, and compiles
        sees = visibility()
        q.grad = k.grad = v.grad = None
        reset_peak(device)
        before, began = peak_bytes(device), clock()
        way(q, k, v, sees, width**-0.5).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - began)
        peaks.append(peak_bytes(device) - before)
    return {"seconds": min(seconds[1:]), "megabytes": max(peaks[1:]) / 2**20}


def main() -> None:
    """Measure and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parser.parse_args()
    path, lengths = options.out / f"attention_{device}.jsonl", options.lengths or LENGTHS[device]
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "heads": list(HEADS[device]),
    }
    for length in lengths:
        for kind in visibilities(length, device):
            cells = [about | {"length": length, "sees": kind, "way": name} for name in ways(device, length)]

            def make(cell: dict[str, Any]) -> dict[str, float]:
                way = ways(device, cell["length"])[cell["way"]]
                return measure(way, lambda: visibilities(cell["length"], device)[cell["sees"]], cell["length"], device)

            ours, *others = fill(path, cells, make)
            for cell in others:
                ratios = (f"{cell[key] / ours[key]:.2f} x ours in {key}" for key in ("seconds", "megabytes"))
                print(f"{length:6d}  {kind:22s} {cell['way']:18s} {', '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
