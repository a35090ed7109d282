"""Lines written as soon as they are made, so that a killed job goes on where it was.

The first line says what the lines were made with; lines made with anything else are never taken over.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from longspec import jsonl
from longspec.distributed import ALONE, Ranks, log, of_first_rank

Identity = dict[str, Any]
Line = dict[str, Any]


def unfinished(out: Path) -> Path:
    """Return the file that holds the lines of `out` until all are there."""
    return out.with_suffix(".unfinished.jsonl")


def finished(out: Path) -> Path:
    """Return the file that keeps the lines of `out` and their identity; Snakemake removes `out` before its job runs again."""
    return out.with_name(f".{out.stem}.measured.jsonl")


def read_finished(out: Path, identity: Identity, ranks: Ranks = ALONE) -> list[Line]:
    """Return the lines that write_finished kept, [] if they were made otherwise. Raises ValueError as Journal does."""
    return of_first_rank(lambda: _lines_of(finished(out), identity, "a finished evaluation"), ranks) or []


def write_finished(out: Path, identity: Identity, lines: list[Line]) -> None:
    """Keep the lines of `out` for a later job that wants more of them."""
    jsonl.write(finished(out), [{"identity": identity}, *lines])


class Journal(AbstractContextManager["Journal"]):
    """Hold a file that grows line by line; `lines` are the lines it held when it was opened.

    Every rank makes the same lines and goes on from `lines`; rank 0 writes them. A last line that a kill tore is dropped. Lines
    reach the disk with sync() or whenever the system writes them; lines lost in a power cut are made again. of: what the lines
    are, for the log. aside: whether a file of lines made otherwise is kept under another name. keys: of `lines`; None: all.
    Raises ValueError, with file and line, for any other line that cannot be read.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        ranks: Ranks,
        *,
        of: str = "an unfinished evaluation",
        aside: bool = False,
        keys: Sequence[str] | None = None,
    ) -> None:
        self.path = path
        self._handle: TextIO | None = None  # on rank 0
        self.lines = of_first_rank(lambda: self._open(identity, of, aside, keys), ranks)

    def _open(self, identity: Identity, of: str, aside: bool, keys: Sequence[str] | None) -> list[Line]:
        lines = _lines_of(self.path, identity, of, keys)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if lines is None:
            if aside and self.path.exists():
                other = self.path.with_suffix(f".{self.path.stat().st_mtime_ns}{self.path.suffix}")
                self.path.rename(other)
                log(f"{other}: has these lines; remove it when nobody wants them")
            self.path.write_text(jsonl.encode({"identity": identity}) + "\n", encoding="utf-8")
        else:
            with self.path.open("r+b") as handle:  # cut after its last line end
                handle.truncate(sum(len(line) for line in handle if line.endswith(b"\n")))
        self._handle = self.path.open("a", encoding="utf-8")
        return lines or []

    def __exit__(self, *_: object) -> None:
        if self._handle:
            self._handle.close()

    def append(self, line: Line) -> None:
        """Add a line."""
        if self._handle:
            self._handle.write(jsonl.encode(line) + "\n")
            self._handle.flush()

    def sync(self) -> None:
        """Flush all lines to the disk."""
        if self._handle:
            os.fsync(self._handle.fileno())

    def remove(self) -> None:
        """Remove the file, which is no longer needed."""
        if self._handle:
            self._handle.close()
            self.path.unlink()


def _lines_of(path: Path, identity: Identity, of: str, keys: Sequence[str] | None = None) -> list[Line] | None:
    """Return the whole lines of a file begun with this identity; None if there are none to go on with."""
    lines = jsonl.whole_lines(path, None if keys is None else ("identity", *keys))
    if not lines:
        return None
    begun_with = lines[0].get("identity")
    if not isinstance(begun_with, dict):
        raise ValueError(f"{path}: line 1: identity: is missing; remove the file to begin anew")
    differing = [key for key in sorted({*begun_with, *identity}) if begun_with.get(key) != identity.get(key)]
    if differing:
        told = ", ".join(f"{key}: {begun_with.get(key)} then, {identity.get(key)} now" for key in differing)
        log(f"{path}: {len(lines) - 1} lines of {of} are left out, made otherwise: {told}")
        return None
    with path.open("rb") as handle:
        torn = "" if handle.seek(-1, os.SEEK_END) and handle.read() == b"\n" else ", the torn one behind them left out"
    log(f"{path}: {len(lines) - 1} lines of {of}{torn}")
    return lines[1:]
