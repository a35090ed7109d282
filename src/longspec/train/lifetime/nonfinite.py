"""Steps that were skipped because their loss or gradient was not finite: their rows are written down, too many end the job."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from longspec.distributed import Ranks, log
from longspec.train.checkpoint.checkpoint_dir import CHECKPOINTS
from longspec.train.lifetime.admission import NonRetryableError


class SkippedSteps:
    """Asked after every step, by all ranks alike."""

    def __init__(self, file: Path, ranks: Ranks, max_in_a_row: int) -> None:
        self.skipped_file, self.ranks, self.max_in_a_row = file, ranks, max_in_a_row
        self.in_a_row = 0

    def check_step(self, step: int, losses: list[tuple[Any, Tensor]], *, skipped: bool) -> None:
        """Write down the rows of a step (counted from 1) that was skipped because its gradient was not finite.

        `losses`: row numbers and loss of each micro batch of this rank. Raises NonRetryableError after too many in a row.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        everyone: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(everyone, [([int(row) for row in rows], float(loss)) for rows, loss in losses])
        batches = [batch for batches in everyone for batch in batches]
        # A finite loss may still have a gradient that is not; then any row may be the cause.
        bad = [rows for rows, loss in batches if not math.isfinite(loss)] or [rows for rows, _ in batches]
        rows = sorted(row for group in bad for row in group)
        if self.ranks.is_main:
            with suppress(OSError), self.skipped_file.open("a", encoding="utf-8") as file:  # full disk: the log has the rows
                file.write(json.dumps({"step": step, "rows": rows}) + "\n")
        log(f"WARNING step {step} skipped: loss or gradient is not finite; rows {rows} (see {self.skipped_file})", self.ranks)
        if self.in_a_row > self.max_in_a_row:
            raise NonRetryableError(
                f"step {step}: {self.in_a_row} steps in a row skipped, their loss or gradient is not finite; their rows stand "
                f"in {self.skipped_file}: look at them with python -m longspec.data inspect. To go on from the last "
                "checkpoint, which is from before them or holds the same weights: raise runtime.max_skipped_in_a_row. Or lower "
                "recipe.optimizer.lr, or correct the data, and train anew after: "
                f"rm -r {self.skipped_file.with_name(CHECKPOINTS)}"
            )
