"""Record the numbers of a training's steps in metrics.jsonl, and compute those besides losses: speed, memory, operations."""

import json
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longspec import jsonl
from longspec.config import Runtime
from longspec.methods import measures_target
from longspec.train.estimate import flops
from longspec.train.micro_batches import StepBatches


def _finite(value: Any) -> Any:
    """Replace each number that is not finite by None, in nested dicts too."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Write one line per step to a file next to the checkpoints; lines of steps after the resumed one are removed first.

    Removed lines are not parsed: a node that lost its power may have torn them.
    check: called before each write; it does not return if another job writes there.
    """

    def __init__(self, path: Path, resumed_step: int, check: Callable[[], None] = lambda: None) -> None:
        check()
        jsonl.write(path, [row for row in jsonl.whole_lines(path, most=resumed_step) if row["step"] <= resumed_step])
        self.path, self.check, self.handle = path, check, path.open("ab")

    def append(self, row: dict[str, Any]) -> None:
        """Add one step's numbers; a number that is not finite is written as null, since JSON has no such number."""
        self.check()
        self.handle.write(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")
        self.handle.flush()

    def sync(self) -> None:
        """Flush the lines to disk, before a checkpoint says that their steps are done."""
        os.fsync(self.handle.fileno())

    def publish(self, final: Path) -> None:
        """Copy the whole record to its final name."""
        self.handle.close()
        self.check()
        jsonl.write(final, jsonl.whole_lines(self.path))


def costs_of(
    row: dict[str, Any], batches: StepBatches, config: Any, runtime: Runtime, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what to add to a step's row, which holds step (counted from 1), tokens and seconds; for rank 0.

    config: of the target. `flops` and `mfu` count the model's own operations, over all ranks. The peak is that of this rank's
    memory so far: what torch allocated on its GPU, or on CPUs the process's resident set.
    """
    step, peak = row["step"] - 1, flops.peak(device, dtype, runtime.peak_tflops)
    documents = flops.document_lengths(batches.rows, batches.row_numbers(step))
    of = (config, batches.method, batches.settings, row["tokens"], documents, batches.num_labels(step))
    measured = measures_target(batches.recipe, runtime)
    operations = sum(flops.operations(*of, batches.recipe.states, with_llm_loss=measured))
    if device.type == "cuda":
        memory = {"peak_gpu_bytes": torch.cuda.max_memory_allocated(device)}
    else:
        memory = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}  # Linux counts in KiB
    return {
        "tokens_per_second": row["tokens"] / row["seconds"],
        "flops": operations,
        "mfu": None if peak is None else operations / row["seconds"] / (peak * batches.ranks.world_size),
        **memory,
    }
