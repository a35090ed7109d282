"""Requests to stop a training job: signals, and the deadline of the job by the trainer's own clock."""

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from longspec.train.lifetime.launcher import LAUNCHER_GONE

# What ranks tell each other: 0 goes on, a number is an index here. Of several reasons the last one counts: a launcher
# that is told SIGINT sends its ranks SIGTERM and ends, and signals that wait for a busy rank may arrive in any order.
REASONS = ("", "the launcher is gone", "signal SIGTERM", "signal SIGINT", "deadline")
SIGNALS = {LAUNCHER_GONE: 1, signal.SIGTERM: 2, signal.SIGINT: 3}
DEADLINE = 4
# A terminal signals ranks and launcher at once, and launchers pass on to their ranks the signals they get.
SAME_REQUEST = 10.0  # seconds; a machine under load is slow to pass it on


class Stop:
    """Whether the job is to stop, agreed between the ranks; a second request by a signal ends this rank at once.

    `deadline` is a time of day in seconds since 1970, None = none; `margin` are seconds to spare before
    it. Ranks agree over `control`, a group on CPUs, so that asking at every micro batch waits for no GPU; None = this
    process is the only one.
    """

    def __init__(self, deadline: float | None = None, margin: float = 0.0, control: Any = None) -> None:
        self.deadline, self.margin, self.control = deadline, margin, control
        self.longest = {"micro batch": 0.0, "save": 0.0}  # seconds
        self.reason = ""  # once all ranks have agreed
        self._received, self._received_at = 0, 0.0
        self._listen()

    def _listen(self) -> None:
        """Have a thread take the signals: Python's own handlers do not run while the main thread waits in a collective."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # only signals with a handler are written to the pipe

        def listen() -> None:
            while True:
                for number in os.read(reading, 64):
                    if number in SIGNALS:
                        self._receive(signal.Signals(number))

        threading.Thread(target=listen, name="signals", daemon=True).start()

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self._received:
            self._received_at = now
        elif number != LAUNCHER_GONE and now - self._received_at > SAME_REQUEST:
            os._exit(128 + number)
        self._received = max(self._received, SIGNALS[number])

    def asked(self) -> bool:
        """Whether this rank was asked to stop by a signal."""
        return self._received > 0

    def took(self, what: str, seconds: float) -> None:
        """Note how long a micro batch or a save took: what comes next may take as long."""
        self.longest[what] = max(self.longest[what], seconds)

    def agreed(self) -> bool:
        """Whether all ranks stop now, and in `reason` why. A collective: every rank must call it, and all get one answer."""
        asked = self._received
        # One more micro batch and a save must fit, and saving to a shared disk may take twice as long the next time.
        needed = self.longest["micro batch"] + 2 * self.longest["save"] + self.margin
        if self.deadline is not None and time.time() + needed >= self.deadline:
            asked = DEADLINE
        if self.control is not None:
            all_asked = torch.tensor(asked)
            dist.all_reduce(all_asked, op=dist.ReduceOp.MAX, group=self.control)
            asked = int(all_asked)
        self.reason = REASONS[asked]
        return asked > 0
