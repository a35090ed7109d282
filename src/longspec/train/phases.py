"""Where a step's time goes: data, the target's forward, the draft's forward and backward, the optimizer, saving."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from longspec.stopwatch import Stopwatch

PHASES = ("data", "target_forward", "draft", "optimizer", "save", "held_out", "other")
DATA, TARGET, DRAFT, OPTIMIZER, SAVE, HELD_OUT, OTHER = PHASES


class Phases:
    """A timeline of which phase is running. A call of `now` costs a microsecond on a CPU, and some on a GPU.

    On a GPU the marks are events in its stream, so nothing waits for it, and a phase is what it costs the GPU: batches that
    are read while it still works are free, and only the wait for them counts as data.
    """

    def __init__(self, device: torch.device, *, on: bool = True, passed: Callable[[str], None] = lambda phase: None) -> None:
        """`on`: whether anybody will take the times; else nothing is kept. `passed` hears of every phase that begins."""
        self.on, self.passed = on, passed
        self._whole = False  # whether what runs is one phase, whatever its parts are
        self._clock, self._phase = Stopwatch(device), OTHER

    def now(self, phase: str) -> None:
        """Begin a phase, one of PHASES; the time until the next call counts as its own."""
        self.passed(phase)
        if self.on and not self._whole:
            self._clock.mark(self._phase)
            self._phase = phase

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
        self._clock.mark(self._phase)
        return dict.fromkeys(PHASES, 0.0) | self._clock.take()
