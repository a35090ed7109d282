"""rejects.jsonl and rejects.raw: each fault with its place, the original bytes to correct, and what they sum up to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import jsonlines

from longspec import jsonl
from longspec.atomic_files import new_file
from longspec.data.read.items import Item, Note
from longspec.data.read.record_checks import RecordError

ROWS, ORIGINALS = "rejects.jsonl", "rejects.raw"
LONGEST = 300  # characters of a reason: it may quote the record
MOST_REASONS = 1000  # counted one by one; the rest counts as other reasons
SHOWN = 20  # reasons in a manifest
OTHERS = ("", "other reasons")  # field and reason of all that are not counted one by one
NOT_SHARED = "\udfff"  # a number of several faults; no text that is written down holds it
_NUMBER = re.compile(rf"0x[0-9a-f]+|U\+[0-9A-F]+|\d+|{NOT_SHARED}")


def _short(text: str) -> str:
    """A text that may quote the record: not too long, and without lone surrogates, which many readers of JSON refuse."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return text.encode("utf-8", "backslashreplace").decode()


def _shared(one: str, other: str) -> str:
    """A text of which another differs in numbers alone, with NOT_SHARED in place of those."""
    numbers = iter(_NUMBER.findall(other))
    return _NUMBER.sub(lambda mine: mine[0] if mine[0] == next(numbers) else NOT_SHARED, one)


class Rejects:
    """Writes the rejects of a dataset. `rejected`: how many records; `notes`: what was unusual, but read."""

    def __init__(self, rows: jsonlines.Writer, originals: BinaryIO) -> None:
        self._rows, self._originals = rows, originals
        self._item: Item | None = None
        self._place = (0, 0)  # of its original bytes: offset and length
        self._written, self._ends_line = 0, True
        self._reasons: dict[tuple[str, str], dict[str, Any]] = {}  # faults that differ in numbers alone are of one kind
        self.rejected = 0
        self.notes: list[dict[str, Any]] = []

    def add(self, item: Item, fault: RecordError) -> None:
        """Write down a fault. Several of one item (a flattened list's) share its original bytes."""
        if item is not self._item:
            self._item, self._place = item, self._keep(item)
        self.rejected += 1
        row: dict[str, Any] = {"file": item.file, "line": item.line, "field": _short(fault.field)}
        row["reason"] = _short(fault.reason)
        self._count(row)
        self._rows.write(row | {"outcome": "rejected", "offset": self._place[0], "bytes": self._place[1]})

    def note(self, note: Note) -> None:
        """Write down what was read without loss."""
        row: dict[str, Any] = {"file": note.file, "line": note.line, "field": "line", "reason": note.reason}
        row["count"] = note.count
        self.notes.append(row)
        self._rows.write(row | {"outcome": "kept", "offset": None, "bytes": 0})

    def _keep(self, item: Item) -> tuple[int, int]:
        """Copy an item's original bytes, on a line of their own; their offset and length."""
        if not self._ends_line:
            self._written += self._originals.write(b"\n")
        start = self._written
        for piece in item.original:
            self._written += self._originals.write(piece)
            self._ends_line = piece.endswith(b"\n") if piece else self._ends_line
        return start, self._written - start

    def _count(self, row: dict[str, Any]) -> None:
        field, reason = row["field"], row["reason"]
        key = (_NUMBER.sub("\0", field), _NUMBER.sub("\0", reason))
        if key not in self._reasons and len(self._reasons) >= MOST_REASONS:
            key = field, reason = OTHERS
        first = {"field": field, "reason": reason, "count": 0, "file": row["file"], "line": row["line"]}
        alike = self._reasons.setdefault(key, first)
        alike |= {"field": _shared(alike["field"], field), "reason": _shared(alike["reason"], reason)}
        alike["count"] += 1

    def summary(self) -> list[dict[str, Any]]:
        """The reasons by frequency, each with the place of its first record; the rarest in one row.

        A number that not all faults of a kind share is shown as N.
        """
        ordered = sorted(self._reasons.values(), key=lambda alike: -alike["count"])
        told = [row | {name: row[name].replace(NOT_SHARED, "N") for name in ("field", "reason")} for row in ordered]
        if rest := told[SHOWN:]:
            count = sum(reason["count"] for reason in rest)
            told[SHOWN:] = [rest[0] | {"field": OTHERS[0], "reason": OTHERS[1], "count": count}]
        return told


@contextmanager
def open_rejects(folder: Path) -> Iterator[Rejects]:
    """Both files in a folder, under their names when the block ends without an error."""
    with (
        new_file(folder / ORIGINALS) as originals_beside,
        new_file(folder / ROWS) as rows_beside,
        originals_beside.open("wb") as originals,
        jsonlines.open(rows_beside, mode="w", dumps=jsonl.encode) as rows,
    ):
        yield Rejects(rows, originals)
