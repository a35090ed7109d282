"""Lines on the disk as soon as they are made, so that a killed job goes on where it was.

The first line says what they were made with; lines of anything else are never taken over.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.distributed import Ranks, log

Identity = dict[str, Any]
Line = dict[str, Any]


def unfinished(out: Path) -> Path:
    """Where the lines lie until those of `out` are all there."""
    return out.with_suffix(".unfinished.jsonl")


class Journal(AbstractContextManager["Journal"]):
    """A file of lines that grows line by line; `lines` are those it held when it was opened.

    A last line that was torn by the end of its process is left out. Lines reach the disk with sync() or whenever the system
    writes them: those that a power cut loses are made again. of: whose lines they are, for the log. aside: whether a file of
    lines that were made otherwise stays, under another name. Raises ValueError with file and line for any other line that
    cannot be read.
    """

    def __init__(self, path: Path, identity: Identity, of: str = "an unfinished evaluation", *, aside: bool = False) -> None:
        self.path, self.lines = path, _lines_of(path, identity, of)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.lines is None:
            if aside and path.exists():
                other = path.with_suffix(f".{path.stat().st_mtime_ns}{path.suffix}")
                path.rename(other)
                log(f"{other}: has these lines; remove it when nobody wants them")
            path.write_text(jsonl.encode({"identity": identity}) + "\n", encoding="utf-8")
            self.lines = []
        else:
            with path.open("r+b") as handle:  # cut behind its last line end
                handle.truncate(handle.read().rfind(b"\n") + 1)
        self._handle = path.open("a", encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def append(self, line: Line) -> None:
        """Add a line."""
        self._handle.write(jsonl.encode(line) + "\n")
        self._handle.flush()

    def sync(self) -> None:
        """Have all lines on the disk."""
        os.fsync(self._handle.fileno())

    def remove(self) -> None:
        """The file is no longer needed."""
        self._handle.close()
        self.path.unlink()


class Followed:
    """A journal as it is for ranks that make the same lines as the one that writes them: they add nothing to it."""

    def __init__(self, path: Path, lines: list[Line]) -> None:
        self.path, self.lines = path, lines

    def append(self, line: Line) -> None:
        """Nothing to do."""

    def sync(self) -> None:
        """Nothing to do."""

    def remove(self) -> None:
        """Nothing to do."""


@contextmanager
def journal_of(path: Path, identity: Identity, ranks: Ranks, **options: Any) -> Iterator[Journal | Followed]:
    """The journal of ranks that make the same lines: rank 0 writes it, and all go on from what it held.

    options: as of Journal.
    """
    if ranks.world_size == 1:
        with Journal(path, identity, **options) as journal:
            yield journal
        return
    from longspec.process_group import of_first_rank  # torch, which a single process may do without

    with Journal(path, identity, **options) if ranks.is_main else nullcontext() as written:
        lines = of_first_rank(lambda: written.lines if written else [], ranks)
        yield written or Followed(path, lines or [])


def _lines_of(path: Path, identity: Identity, of: str) -> list[Line] | None:
    """The whole lines of a file that was begun with this identity; None when there is none to go on with."""
    *whole, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if not whole:
        return None
    lines = []
    for number, text in enumerate(whole, 1):
        try:
            lines.append(jsonl.parse(text))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}; remove the file to begin anew") from error
    begun_with = lines[0].get("identity")
    if not isinstance(begun_with, dict):
        raise ValueError(f"{path}: line 1: identity: is missing; remove the file to begin anew")
    differing = [key for key in sorted({*begun_with, *identity}) if begun_with.get(key) != identity.get(key)]
    if differing:
        told = ", ".join(f"{key}: {begun_with.get(key)} then, {identity.get(key)} now" for key in differing)
        log(f"{path}: {len(whole) - 1} lines of {of} are left out, made otherwise: {told}")
        return None
    log(f"{path}: {len(whole) - 1} lines of {of}" + (", the torn one behind them left out" if torn else ""))
    return lines[1:]
