"""A training job that hears of its deadline in the midst.

    python -m tests.train.lifetime.timed MICRO_BATCHES SECONDS -m longspec.train ARGUMENTS

It is so many seconds after so many micro batches, whatever the machine does besides. The job prints it.
"""

import sys
import time

import longspec.train.__main__ as program
from longspec.train.preemption import Stop


class Timed(Stop):
    """A deadline that is set by one of the questions whether to stop."""

    micro_batches, seconds, asked_before = 0, 0.0, 0

    def agreed(self) -> bool:
        self.asked_before += 1
        if self.asked_before == self.micro_batches:
            self.deadline = time.time() + self.seconds
            print(f"deadline {self.deadline}", flush=True)
        return super().agreed()


if __name__ == "__main__":
    Timed.micro_batches, Timed.seconds = int(sys.argv[1]), float(sys.argv[2])
    sys.argv[1:] = sys.argv[5:]
    program.Stop = Timed  # type: ignore[misc]
    program.main()
