"""metrics.jsonl: one line per optimizer step, without duplicates however often the job was killed."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.distributed import log


def _finite(value: Any) -> Any:
    """Replaces each number that is not finite by None, in nested dicts too."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Appends to a file beside the checkpoints; lines of steps after the resumed one are dropped first.

    A full disk costs no step: lines wait in memory until there is room, at the latest until the next checkpoint.
    `check` is called before each write, and does not return when another job writes there.
    """

    def __init__(self, path: Path, resumed_step: int, check: Callable[[], None] = lambda: None) -> None:
        check()
        kept = [row for row in whole_lines(path) if row["step"] <= resumed_step]
        jsonl.write(path, kept)
        self.path, self.check = path, check
        self.handle = path.open("ab", buffering=0)
        self.waiting = b""

    def append(self, row: dict[str, Any]) -> None:
        """One step's numbers; one that is not finite is written as null, since JSON knows no other."""
        was_waiting = bool(self.waiting)
        self.waiting += json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        fault = self._write()
        if fault is not None and not was_waiting:
            log(f"WARNING {self.path}: {fault}; its lines wait in memory")

    def _write(self) -> OSError | None:
        """Write what waits, as far as there is room; what stopped it."""
        while self.waiting:
            try:
                self.check()
                written = self.handle.write(self.waiting)
            except OSError as fault:
                return fault
            self.waiting = self.waiting[written:]
        return None

    def sync(self) -> None:
        """Have the lines on the disk before a checkpoint says that their steps are done. Raises OSError for a full disk."""
        fault = self._write()
        if fault is not None:
            raise OSError(f"{self.path}: {fault}: {len(self.waiting)} bytes of it wait") from fault
        os.fsync(self.handle.fileno())

    def publish(self, final: Path) -> None:
        """Copy the whole record to its final name."""
        self.handle.close()
        self.check()
        jsonl.write(final, whole_lines(self.path))


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The file's rows, less a last line that a kill tore. Raises ValueError for another line that is not JSON."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            rows += [json.loads(line)] if line else []
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: damaged ({error}); remove that line") from error
    return rows
