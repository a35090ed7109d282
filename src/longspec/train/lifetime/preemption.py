"""Ends a training job: on request (signals), by its deadline, and when it makes no progress any more."""

import faulthandler
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

# Of several reasons the last one counts: a launcher that is told SIGINT sends its ranks SIGTERM and ends, and signals that
# wait for a busy rank may arrive in any order. Ranks tell each other the index of theirs.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
REASONS = ("", *(f"signal {number.name}" for number in SIGNALS), "deadline")
# A terminal signals ranks and launcher at once, and launchers pass on to their ranks the signals they get.
SAME_REQUEST = 10.0  # seconds; a machine under load is slow to pass it on
# Ranks that wait for each other are late at the same moment; written at once their stacks would be one jumble.
STAGGER = 1.0  # seconds between two ranks of a machine, few enough for torchrun, which kills the others after 30


class Stop:
    """Whether the job is to stop, agreed between the ranks; a second request by a signal ends this rank at once.

    A micro batch, a save or another part that takes longer than `longest_part` seconds ends this rank, whatever it waits
    for, with the stacks of all its threads on stderr; its launcher then ends the others.

    `deadline` is a time of day in seconds since 1970, None = none; `margin` are seconds to spare before it. Ranks agree over
    `control`, a group on CPUs, so that asking at every micro batch waits for no GPU; None = this process is the only one.
    """

    def __init__(
        self, longest_part: float, deadline: float | None = None, margin: float = 0.0, control: Any = None, local_rank: int = 0
    ) -> None:
        self.longest_part = longest_part + STAGGER * local_rank
        self.deadline, self.margin, self.control = deadline, margin, control
        self.reason = ""  # once all ranks have agreed
        self._longest_batch, self._longest_save = 0.0, 0.0  # seconds
        self._batch_began: float | None = None
        self._received, self._received_at = 0, 0.0
        self._listen()

    def begin_part(self) -> None:
        """Begin a part of the training that must not take longer than `longest_part` seconds; the part before has ended."""
        faulthandler.dump_traceback_later(self.longest_part, exit=True)

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
        elif now - self._received_at > SAME_REQUEST:
            os._exit(128 + number)
        self._received = max(self._received, 1 + SIGNALS.index(number))

    def before_micro_batch(self) -> bool:
        """Whether the job stops before the next micro batch: all ranks ask, and all get one answer.

        The time between two calls is taken for one micro batch's.
        """
        now = time.perf_counter()
        if self._batch_began is not None:
            self._longest_batch = max(self._longest_batch, now - self._batch_began)
        self._batch_began = now
        self.begin_part()
        return self.agreed()

    def saved(self, seconds: float) -> None:
        """Note that a save is done, which took so long: the next one may take as long."""
        self._longest_save, self._batch_began = max(self._longest_save, seconds), None

    def agreed(self) -> bool:
        """Whether all ranks stop now, and in `reason` why. A collective: every rank must call it, and all get one answer."""
        asked = self._received
        # One more micro batch and a save must fit, and saving to a shared disk may take twice as long the next time.
        needed = self._longest_batch + 2 * self._longest_save + self.margin
        if self.deadline is not None and time.time() + needed >= self.deadline:
            asked = REASONS.index("deadline")
        if self.control is not None:
            all_asked = torch.tensor(asked)
            dist.all_reduce(all_asked, op=dist.ReduceOp.MAX, group=self.control)
            asked = int(all_asked)
        self.reason = REASONS[asked]
        return asked > 0
