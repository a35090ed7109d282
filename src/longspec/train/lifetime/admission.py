"""May this job go on, and how did it end? No torch: rules and reports ask too.

    status.json: {"state": "running" | "done" | "stopped" | "failed", "step", "steps", "reason", "deterministic"}

Exit codes do not survive the launchers in between (torchrun returns 1 whatever its workers return): this file does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, sha256_file, write_json
from longspec.config import differences
from longspec.distributed import log
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, find_slot

STATUS = "status.json"


class NonRetryableError(ValueError):
    """A failure that the same job would run into again: starting it anew is of no use."""


@contextmanager
def non_retryable() -> Iterator[None]:
    """Turn a ValueError into a NonRetryableError: wrong settings, data or weights are wrong in the next attempt too."""
    try:
        yield
    except ValueError as error:
        raise NonRetryableError(str(error)) from error


def find_resumable(folder: Path, identity: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Find the slot to go on from; None to start afresh.

    Checkpoints of a finished stage with another identity (recipe, data, target, initial weights, dtype) are set aside, none
    is deleted. Raises ValueError for those of an unfinished one: half a training is not thrown away by an edit.
    """
    found = find_slot(folder)
    changed = differences(found[1]["identity"], identity) if found else []
    if not found or not changed:
        return found
    slot, manifest = found
    if manifest["step"] < manifest["steps"]:
        raise NonRetryableError(
            f"{folder}: its checkpoints (step {manifest['step']} of {manifest['steps']}) were made with other settings: "
            f"{'; '.join(changed)}. Undo the change to go on, or train anew after: rm -r {folder}"
        )
    aside = folder.with_name(f"{folder.name}.{sha256_file(folder / slot / MANIFEST)[:8]}")
    folder.rename(aside)
    log(f"training anew, since {'; '.join(changed)}; the finished stage's checkpoints are kept in {aside}")
    return None


class Status:
    """The writer of a job's status.json, on rank 0; check_owner ends this process when the folder has become another job's."""

    def __init__(self, out: Path, check_owner: Callable[[], None]) -> None:
        self.out, self.check_owner = out, check_owner
        self.step, self.steps = 0, 0  # the last step that is done, of how many

    def write(self, state: str, reason: str = "", deterministic: bool = False) -> None:
        """Write the file. A full disk is a warning and ends no job."""
        content = {"state": state, "reason": reason, "deterministic": deterministic, "step": self.step, "steps": self.steps}
        try:
            self.check_owner()
            write_json(self.out / STATUS, content)
        except OSError as fault:
            log(f"WARNING {self.out / STATUS} could not be written: {fault}")

    def fail(self, error: BaseException) -> None:
        """Write down a failure."""
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        self.write("failed", reason, isinstance(error, NonRetryableError))


def non_retryable_reason(out: Path, since: float) -> str:
    """Return why a stage's job would fail in the same way again, by what it wrote after `since` (seconds since 1970)."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # no file yet, or a damaged one: no reason is known
        status = read_json(out / STATUS)
        if (out / STATUS).stat().st_mtime >= since and status["state"] == "failed" and status["deterministic"]:
            return str(status["reason"])
    return ""
