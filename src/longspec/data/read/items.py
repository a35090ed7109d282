"""What every file reader gives: records with their places, faults and notes on the file; and how faults are written down.

rejects.jsonl has each fault with its place, rejects.raw the original bytes to correct.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jsonlines

from longspec import jsonl
from longspec.atomic_files import new_file
from longspec.data.read.record_checks import RecordError

ROWS, ORIGINALS = "rejects.jsonl", "rejects.raw"
MAX_REASON_CHARACTERS = 300  # characters of a reason: it may quote the record
MAX_SUMMARY_ROWS = 20  # reasons in a manifest
_NUMBER = re.compile(r"0x[0-9a-f]+|U\+[0-9A-F]+|\d+")


@dataclass(frozen=True)
class Item:
    """One thing read: a record, or something that is none (`error` says why), or neither when a setting left it out."""

    file: str
    line: int  # of JSON Lines; in every other kind of file the number of the record; from 1
    key: bytes  # decides whether it is held out
    record: dict[str, Any] | None
    original: bytes = b""  # as it stands in the file; nothing of one that is too large
    error: RecordError | None = None


@dataclass
class Note:
    """Something unexpected in a file, reported though the file is read without loss."""

    file: str
    line: int  # where it was met first
    reason: str
    count: int = 0


class Notes(dict[str, Note]):
    """The notes on one file, by their reasons."""

    def add(self, file: Path, reason: str, line: int) -> None:
        """Note something, or count it once more."""
        self.setdefault(reason, Note(str(file), line, reason)).count += 1


def _short(text: str) -> str:
    """A text that may quote the record: not too long, and without lone surrogates, which many readers of JSON refuse."""
    text = text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:MAX_REASON_CHARACTERS]}…"
    return text.encode("utf-8", "backslashreplace").decode()


class Rejects:
    """Writes the rejects of a dataset. `rejected`: how many records."""

    def __init__(self, rows: jsonlines.Writer, originals: BinaryIO) -> None:
        self._rows, self._originals = rows, originals
        self._item: Item | None = None
        self._place: dict[str, int] = {}  # of its original bytes
        self._reasons: dict[str, dict[str, Any]] = {}  # faults that differ in numbers alone are of one kind
        self.rejected = 0

    def add(self, item: Item, fault: RecordError) -> None:
        """Write down a fault. Several of one item (a flattened list's) share its original bytes, on a line of their own."""
        if item is not self._item:
            self._item, self._place = item, {"offset": self._originals.tell(), "bytes": len(item.original)}
            self._originals.write(item.original if item.original.endswith(b"\n") else item.original + b"\n")
        self.rejected += 1
        row = {"file": item.file, "line": item.line, "field": _short(fault.field), "reason": _short(fault.reason)}
        kind = _NUMBER.sub("\0", f"{row['field']}: {row['reason']}")
        self._reasons.setdefault(kind, row | {"count": 0})["count"] += 1
        self._rows.write(row | self._place)

    def summary(self) -> list[dict[str, Any]]:
        """Return the reasons by frequency, each as its first record has it, with that one's place; the rarest in one row."""
        rows = sorted(self._reasons.values(), key=lambda row: -row["count"])
        if rest := rows[MAX_SUMMARY_ROWS:]:
            count = sum(row["count"] for row in rest)
            rows[MAX_SUMMARY_ROWS:] = [rest[0] | {"field": "", "reason": "other reasons", "count": count}]
        return rows


@contextmanager
def open_rejects(folder: Path) -> Iterator[Rejects]:
    """Yield the rejects of a folder, whose files have their names when the block ends without an error."""
    with (
        new_file(folder / ORIGINALS) as originals_beside,
        new_file(folder / ROWS) as rows_beside,
        originals_beside.open("wb") as originals,
        jsonlines.open(rows_beside, mode="w", dumps=jsonl.encode) as rows,
    ):
        yield Rejects(rows, originals)
