"""Time by part of a job's work, without waiting for the device."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Adds up the time between marks under the later mark's name; on a GPU by events in its stream, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """Count the time since the last mark as that of `name`."""
        if not self.on_gpu:
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append((name, event))

    def take(self) -> dict[str, float]:
        """Seconds by name, between the marks since the last call; waits for the GPU to come to the newest one."""
        if self.on_gpu:
            self.marks[-1][1].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, began), (name, ended) in pairwise(self.marks):
            seconds[name] += began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
        self.marks = self.marks[-1:]
        return seconds
