"""The chunked loss: time and memory by the size of its chunks, against all logits at once.

    python benchmarks/loss_chunks.py            on this machine's CPU, or its GPU when there is one
    python benchmarks/loss_chunks.py --quick    one run of each

Kept in benchmarks/results/loss_chunks_{device}.json; the sizes in longspec/models/losses.py come from here.

Shapes: N tokens, H hidden width, V vocabulary.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.peak import best, measure
from longspec.distributed import processor_name
from longspec.models import losses
from longspec.models.teachers import DenseTeacher

RESULTS = Path(__file__).parent / "results"
CHUNKS = {"cpu": (16, 64, 128, 256, 512, 1024), "cuda": (64, 128, 256, 512, 1024, 2048, 4096)}  # tokens
# Tokens, width, vocabulary: the demo's size, a small model's, and QwQ-32B's head.
SIZES = {
    "cpu": [(4096, 128, 1024), (2048, 256, 32_768), (512, 1024, 152_064)],
    "cuda": [(32_768, 4096, 128_256), (32_768, 5120, 152_064)],
}
PLAIN = "all logits at once"


def plain(hidden_NH: Tensor, teacher_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, kind: str) -> Tensor:
    """The loss as one writes it down: every logit in float32."""
    logits_NV, teacher_NV = (F.linear(x, weight_VH).float() for x in (hidden_NH, teacher_NH))
    F.cross_entropy(teacher_NV, labels_N, reduction="sum")  # for the log
    if kind == "hard":
        return F.cross_entropy(logits_NV, labels_N, reduction="sum")
    return -(teacher_NV.softmax(-1) * logits_NV.log_softmax(-1)).sum()


def run_case(case: dict[str, Any]) -> None:
    """Measure one case and print it."""
    device = torch.device(case["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, width, vocabulary = case["size"]
    torch.manual_seed(0)
    hidden_NH, teacher_NH = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
    weight_VH = torch.randn(vocabulary, width, device=device, dtype=dtype) / width**0.5
    labels_N = torch.randint(0, vocabulary, (tokens,), device=device)
    hidden_NH.requires_grad_()
    if isinstance(case["chunk"], int):
        losses.chunk_tokens = lambda *_: case["chunk"]  # type: ignore[assignment]

    def step(rows: int = tokens) -> None:
        hidden, states, labels, kind = hidden_NH[:rows], teacher_NH[:rows], labels_N[:rows], case["kind"]
        if case["chunk"] == PLAIN:
            plain(hidden, states, weight_VH, labels, kind).backward()
            return
        teacher = DenseTeacher(states, weight_VH, labels, None, with_loss=True)
        losses.linear_cross_entropy(hidden, teacher, weight_VH, labels, kind)[0].backward()

    step(8)  # thread pools and kernels
    print(json.dumps(measure(step, device)))


def main() -> None:
    """All cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="one run of each")
    options = parser.parse_args()
    if options.case:
        return run_case(options.case)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for size in SIZES[device]:
        ways = [PLAIN, "chosen", *CHUNKS[device]]
        for kind in ("hard", "soft"):
            for chunk in ways:
                case = {"device": device, "size": size, "kind": kind, "chunk": chunk}
                rows.append(case | best(__file__, case, 0 if options.quick else 2))
                against = next(row for row in rows if (row["size"], row["kind"], row["chunk"]) == (size, kind, PLAIN))
                print(
                    f"{size} {kind} {chunk}: {rows[-1]['MiB'] / against['MiB']:.3f} x the memory ({rows[-1]['MiB']:.0f} MiB), "
                    f"{rows[-1]['seconds'] / against['seconds']:.2f} x the time ({rows[-1]['seconds']:.2f} s)",
                    flush=True,
                )
    name = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    RESULTS.mkdir(exist_ok=True)
    about = {"device": name, "torch": torch.__version__}
    (RESULTS / f"loss_chunks_{device}.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
