"""Micro batches, and the stored states of their rows, each read in the background while the one before it computes."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch

from longspec.train.micro_batches import MicroBatch, StepBatches


class ReadAhead:
    """This rank's micro batches of some 0-based steps in their order. A single thread reads no more than the next one.

    An error of the thread is raised by the `take` of the batch that it befell. When the block ends, so does the thread.
    states: what the method reads of the target, for whose forward stored states are read ahead too.
    """

    def __init__(self, batches: StepBatches, states: Any, steps: Iterable[int], device: torch.device) -> None:
        self.batches, self.states, self.device = batches, states, device
        self._places = ((step, row_numbers) for step in steps for row_numbers in batches.micro_batches(step))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
        self._coming = self._thread.submit(self._read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self) -> MicroBatch | None:
        """Read the next micro batch to the host; None behind the last."""
        place = next(self._places, None)
        if place is None:
            return None
        batch = self.batches.load(*place)
        self.states.prefetch(place[1])
        return batch.pinned() if self.device.type == "cuda" else batch

    def take(self) -> MicroBatch:
        """The next micro batch on the device; the one after it begins to be read."""
        batch = self._coming.result()
        assert batch is not None, "no step is left"
        self._coming = self._thread.submit(self._read)
        return batch.to(self.device)
