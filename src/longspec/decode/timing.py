"""Time by part of a round, without waiting for the device."""

import time
from collections import defaultdict

import torch


class Stopwatch:
    """Adds up the time between marks under the later mark's name; on a GPU by events in its stream, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """Count the time since the last mark as that of `name`."""
        if not self.is_cuda:
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Seconds by name; waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = defaultdict(float)
        for (_, left), (name, right) in zip(self.marks, self.marks[1:], strict=False):
            if isinstance(left, torch.cuda.Event) and isinstance(right, torch.cuda.Event):
                totals[name] += left.elapsed_time(right) / 1000
            elif isinstance(left, float) and isinstance(right, float):
                totals[name] += right - left
        return totals
