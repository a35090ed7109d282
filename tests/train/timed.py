"""A training job that has some seconds from its first step on: `python -m tests.train.timed SECONDS -m longspec.train ...`.

Its start takes longer or shorter with all else that the machine does. It prints its deadline.
"""

import sys
import time

import longspec.train.__main__ as program
from longspec.train.stopping import Stop


class Timed(Stop):
    """A deadline that is counted from the first question."""

    seconds = 0.0

    def agreed(self) -> bool:
        if self.deadline is None:
            self.deadline = time.time() + self.seconds
            print(f"deadline {self.deadline}", flush=True)
        return super().agreed()


if __name__ == "__main__":
    Timed.seconds = float(sys.argv[1])
    sys.argv[1:] = sys.argv[4:]
    program.Stop = Timed  # type: ignore[misc]
    program.main()
