"""Where a step's time goes: data, the target's forward, the draft's forward and backward, the optimizer, saving."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

PHASES = ("data", "target_forward", "draft", "optimizer", "save", "held_out", "other")
DATA, TARGET, DRAFT, OPTIMIZER, SAVE, HELD_OUT, OTHER = PHASES


class Phases:
    """A timeline of which phase is running. A call of `now` costs a microsecond on a CPU, and some on a GPU.

    On a GPU the marks are events in its stream, so nothing waits for it, and a phase is what it costs the GPU: batches that
    are read while it still works are free, and only the wait for them counts as data.
    """

    def __init__(self, device: torch.device, *, on: bool = True, passed: Callable[[str], None] = lambda phase: None) -> None:
        """`on`: whether anybody will take the times; else nothing is kept. `passed` hears of every phase that begins."""
        self.on, self.on_gpu, self.passed = on, device.type == "cuda", passed
        self._whole = False  # whether what runs is one phase, whatever its parts are
        self._marks: list[tuple[str, Any]] = [(OTHER, self._moment())]

    def _moment(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def now(self, phase: str) -> None:
        """Begin a phase, one of PHASES; the time until the next call counts as its own."""
        self.passed(phase)
        if self.on and not self._whole:
            self._marks.append((phase, self._moment()))

    @contextmanager
    def whole(self, phase: str) -> Iterator[None]:
        """Count the whole block as this phase, the target's forwards in it too; OTHER follows."""
        self.now(phase)
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self.now(OTHER)

    def watch(self, target: nn.Module) -> None:
        """Tell the target's forward, a call of this module, from the draft's, which follows it."""
        target.register_forward_pre_hook(lambda *_: self.now(TARGET))
        target.register_forward_hook(lambda *_: self.now(DRAFT))

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; the phase that runs goes on. Waits for the GPU to come this far."""
        self._marks.append((self._marks[-1][0], self._moment()))
        if self.on_gpu:
            self._marks[-1][1].synchronize()
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, began), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
        self._marks = self._marks[-1:]
        return seconds
