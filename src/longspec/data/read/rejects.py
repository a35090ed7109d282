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
_NUMBER = re.compile(r"0x[0-9a-f]+|U\+[0-9A-F]+|\d+")


def _short(text: str) -> str:
    """A text that may quote the record: not too long, and without lone surrogates, which many readers of JSON refuse."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return text.encode("utf-8", "backslashreplace").decode()


class _Alike:
    """Faults whose field and reason differ in numbers alone; a number that they do not share is shown as N."""

    def __init__(self, field: str, reason: str, file: str, line: int) -> None:
        self.count = 0
        self._texts, self._first = (field, reason), {"file": file, "line": line}
        self._numbers: list[str | None] = list(_numbers_of(field, reason))

    def add(self, field: str, reason: str) -> None:
        """Count one more."""
        self.count += 1
        pairs = zip(self._numbers, _numbers_of(field, reason), strict=True)
        self._numbers = [mine if mine == other else None for mine, other in pairs]

    def told(self) -> dict[str, Any]:
        """Field and reason, how many there are, and the place of the first."""
        numbers = iter(self._numbers)
        field, reason = (_NUMBER.sub(lambda _: next(numbers) or "N", text) for text in self._texts)
        return {"field": field, "reason": reason, "count": self.count, **self._first}


def _numbers_of(field: str, reason: str) -> list[str]:
    return [*_NUMBER.findall(field), *_NUMBER.findall(reason)]


class Rejects:
    """Writes the rejects of a dataset. `rejected`: how many records; `notes`: what was unusual, but read."""

    def __init__(self, rows: jsonlines.Writer, originals: BinaryIO) -> None:
        self._rows, self._originals = rows, originals
        self._item: Item | None = None
        self._place = (0, 0)  # of its original bytes: offset and length
        self._written, self._ends_line = 0, True
        self._reasons: dict[tuple[str, str], _Alike] = {}
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
        self._reasons.setdefault(key, _Alike(field, reason, row["file"], row["line"])).add(field, reason)

    def summary(self) -> list[dict[str, Any]]:
        """The reasons by frequency, each with the place of its first record; the rarest in one row."""
        ordered = [alike.told() for alike in sorted(self._reasons.values(), key=lambda alike: -alike.count)]
        rest = ordered[SHOWN:]
        if rest:
            count = sum(reason["count"] for reason in rest)
            other = rest[0] | {"field": OTHERS[0], "reason": OTHERS[1], "count": count}
            ordered[SHOWN:] = [other]
        return ordered


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
