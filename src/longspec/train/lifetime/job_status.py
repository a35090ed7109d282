"""status.json: how a training job stands or ended.

    {"state": "running" | "done" | "stopped" | "failed", "step", "steps", "reason", "deterministic"}

Exit codes do not survive the launchers in between (torchrun returns 1 whatever its workers return): this file does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspec.atomic_files import write_json
from longspec.distributed import Ranks, log
from longspec.lease import Fence
from longspec.train.lifetime.admission import NonRetryableError
from longspec.train.names import STATUS


def reason_of(error: BaseException) -> str:
    """An error in words."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@contextmanager
def non_retryable() -> Iterator[None]:
    """Turn a ValueError into a NonRetryableError: wrong settings, data or weights are wrong in the next attempt too."""
    try:
        yield
    except ValueError as error:
        raise NonRetryableError(str(error)) from error


class Status:
    """The writer of a job's status.json: rank 0, or for it the watchdog of another rank."""

    def __init__(self, out: Path, ranks: Ranks, fence: Fence | None = None) -> None:
        """fence: asked before each write, and ends this process when another job writes there."""
        self.out, self.ranks, self.fence = out, ranks, fence
        self.step, self.steps = 0, 0

    def at(self, step: int, steps: int) -> None:
        """Note the step that is done, of how many."""
        self.step, self.steps = step, steps

    def write(self, state: str, reason: str = "", deterministic: bool = False) -> None:
        """Write the file. A full disk is a warning and ends no job."""
        content = {"state": state, "reason": reason, "deterministic": deterministic, "step": self.step, "steps": self.steps}
        try:
            if self.fence is not None:
                self.fence.check()
            write_json(self.out / STATUS, content)
        except OSError as fault:
            log(f"WARNING {self.out / STATUS} could not be written: {fault}")

    def fail(self, error: BaseException) -> None:
        """Write down a failure."""
        if not self.ranks.is_main:
            return
        self.write("failed", reason_of(error), isinstance(error, NonRetryableError))
