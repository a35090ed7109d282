"""Provide one rank's share of each step's global batch as tensors; the next micro batch is read while one is computed."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.config import Recipe
from longspec.config.schema import shares_of
from longspec.data.pack.arrow_shards import count_labels, stacked
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.methods import method_of
from longspec.models.losses import NO_LABEL

Arguments = dict[str, Any]  # arguments of one forward: int64 tensors [B, S], the rows' numbers [B], what the method draws


def changed(batch: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Return a batch with `change` applied to all tensors except the rows' numbers.

    These stay on the host: stored states are found by them, and reading them from a GPU would wait for all its work.
    """
    kept = "row_numbers"
    return {name: change(each) if isinstance(each, Tensor) and name != kept else each for name, each in batch.items()}


class StepBatches:
    """Give this rank's micro batches for any step, without going through the steps before."""

    def __init__(self, rows: TrainedRows, recipe: Recipe, micro_batch: int, ranks: Ranks, target_positions: int) -> None:
        self.rows, self.recipe, self.micro_batch, self.ranks = rows, recipe, micro_batch, ranks
        self.target_positions = target_positions
        self.schedule = rows.schedule(shares_of(recipe.data), recipe.global_batch, recipe.seed)
        self.method, self.settings = method_of(recipe)

    def row_numbers(self, step: int) -> np.ndarray:
        """Return the row numbers of the whole global batch of a 0-based step."""
        return self.schedule.batch(step)

    def num_labels(self, step: int) -> int:
        """Count the trained tokens of the whole global batch."""
        return count_labels(self.rows.find, self.row_numbers(step))

    def micro_batches(self, step: int) -> list[np.ndarray]:
        """Return the row numbers of each of this rank's micro batches."""
        share = self.row_numbers(step)[self.ranks.rank :: self.ranks.world_size]
        return [share[start : start + self.micro_batch] for start in range(0, len(share), self.micro_batch)]

    def load(self, step: int, row_numbers: np.ndarray) -> Arguments:
        """Read rows to the host and make their random draws, which depend on (seed, step, row) alone."""
        numbers = [int(number) for number in row_numbers]
        rows = [self.rows[number] for number in numbers]
        plain = [(number, row.position_ids_S) for number, row in zip(numbers, rows, strict=True)]
        positions, draws = self.method.draws(self.settings, self.recipe.seed, step, plain, self.target_positions)
        # Padding at the end needs no mask: causality hides it from every token before it.
        document_ids_BS = stacked(rows, "document_ids_S")
        input_ids_BS = stacked(rows, "input_ids_S")
        return {
            "input_ids": torch.from_numpy(input_ids_BS),
            "labels": torch.from_numpy(np.where(stacked(rows, "loss_mask_S") > 0, input_ids_BS, NO_LABEL)),
            "position_ids": torch.from_numpy(np.stack(positions).astype(np.int64)),
            "document_ids": torch.from_numpy(document_ids_BS) if document_ids_BS.max() > 0 else None,
            "row_numbers": torch.tensor(numbers),
            **draws,
        }


class ReadAhead(AbstractContextManager["ReadAhead"]):
    """Read this rank's micro batches of some 0-based steps, in order. One thread reads one micro batch ahead.

    `take` raises an error of the thread when it reaches that batch. The thread ends with the block. states: what the method
    reads of the target; stored states are read ahead too.
    """

    def __init__(self, batches: StepBatches, states: Any, steps: Iterable[int], device: torch.device) -> None:
        self.batches, self.states, self.device = batches, states, device
        self._places = ((step, row_numbers) for step in steps for row_numbers in batches.micro_batches(step))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
        self._coming = self._thread.submit(self._read)

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self) -> Arguments | None:
        """Read the next micro batch to the host; None after the last."""
        place = next(self._places, None)
        if place is None:
            return None
        batch = self.batches.load(*place)
        self.states.prefetch(place[1])
        return changed(batch, Tensor.pin_memory) if self.device.type == "cuda" else batch  # a GPU copies from it alone

    def take(self) -> Arguments:
        """Return the next micro batch on the device, without waiting for the copy, and begin to read the one after it."""
        batch = self._coming.result()
        assert batch is not None, "no step is left"
        self._coming = self._thread.submit(self._read)
        return changed(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
