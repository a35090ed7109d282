"""Requests to stop a training job: signals, and the deadline of the job by the trainer's own clock."""

import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# What ranks tell each other: 0 goes on, a number is an index here. Of several reasons the last one is told.
REASONS = ("", "signal SIGINT", "signal SIGTERM", "deadline")
SIGNALS = {signal.SIGINT: 1, signal.SIGTERM: 2}
DEADLINE = 3


class Stop:
    """Whether the job is to stop, agreed between the ranks; a second signal ends this rank at once.

    `deadline` is a time of day in seconds since 1970, None = none; `margin` are seconds to spare before
    it. Ranks agree over `control`, a group on CPUs, so that asking at every micro batch waits for no GPU; None = this
    process is the only one.
    """

    def __init__(self, deadline: float | None = None, margin: float = 0.0) -> None:
        self.deadline, self.margin = deadline, margin
        self.longest = {"micro batch": 0.0, "save": 0.0}  # seconds
        self.control: Any = None
        self.told = ""  # the reason once all ranks have agreed
        self._received = 0
        for number in SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self._received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._received = SIGNALS[signal.Signals(number)]

    def took(self, what: str, seconds: float) -> None:
        """Note how long a micro batch or a save took: what comes next may take as long."""
        self.longest[what] = max(self.longest[what], seconds)

    def agreed(self) -> bool:
        """Whether all ranks stop now, and in `told` why; the same on every rank, which all must ask."""
        asked = self._received
        # One more micro batch and a save must fit, and saving to a shared disk may take twice as long the next time.
        needed = self.longest["micro batch"] + 2 * self.longest["save"] + self.margin
        if self.deadline is not None and time.time() + needed >= self.deadline:
            asked = DEADLINE
        if self.control is not None:
            all_asked = torch.tensor(asked)
            dist.all_reduce(all_asked, op=dist.ReduceOp.MAX, group=self.control)
            asked = int(all_asked)
        self.told = REASONS[asked]
        return asked > 0
