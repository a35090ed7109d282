"""Time by part of a job's work, without waiting for the device."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Add up the time between marks under the later mark's name. On a GPU, events in its stream measure it, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """Count the time since the last mark under `name`."""
        if not self.on_gpu:
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append((name, event))

    def take(self) -> dict[str, float]:
        """Return the seconds by name, between the marks since the last call. Wait until the GPU reaches the newest mark."""
        if self.on_gpu:
            self.marks[-1][1].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, began), (name, ended) in pairwise(self.marks):
            seconds[name] += began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
        self.marks = self.marks[-1:]
        return seconds
