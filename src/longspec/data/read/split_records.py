"""Items sorted into training records, held-out records, rejects and filtered ones, each one counted.

rejects.jsonl has each fault with its place, rejects.raw the original bytes to correct. If too many records are rejected, the
dataset is refused: its rejects are left to look at, and no manifest to go on with.
"""

import hashlib
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import jsonlines
from tqdm import tqdm

from longspec import jsonl
from longspec.atomic_files import new_file, remove_strays
from longspec.data.align import pipeline
from longspec.data.align.fields import Record, found
from longspec.data.read.record_checks import RecordError
from longspec.data.read.records import ANSWER_IDS, to_messages_or_text
from longspec.data.read.source_files import Item
from longspec.shown import ManyLinesError

# A setting of the workflow: the records are answered anew, so conversations without any answer are records too.
UNANSWERED = "unanswered"
ROWS, ORIGINALS = "rejects.jsonl", "rejects.raw"
KEPT = {"train": "train.jsonl", "held_out": "held_out.jsonl"}
OUTPUTS = [*KEPT.values(), ROWS, ORIGINALS]
MAX_REASON_CHARACTERS = 300  # of a reason, which may quote the record
MAX_SUMMARY_ROWS = 20  # reasons in a manifest
NULL = b"null"
_NUMBER = re.compile(r"0x[0-9a-f]+|U\+[0-9A-F]+|\d+")


def is_held_out(key: bytes, share: float) -> bool:
    """Tell whether a record is kept from training. Its key alone decides, so it is the same in every dataset.

    All that a flatten step makes of one record has its key, and stays together.
    """
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < share * 2**64


def _short(text: str) -> str:
    """Return a text that may quote the record: shortened, and without lone surrogates, which many readers of JSON refuse."""
    text = text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:MAX_REASON_CHARACTERS]}…"
    return text.encode("utf-8", "backslashreplace").decode()


class Rejects:
    """Write the rejects of a dataset. rejected: how many there are."""

    def __init__(self, rows: jsonlines.Writer, originals: BinaryIO) -> None:
        self._rows, self._originals = rows, originals
        self._item: Item | None = None
        self._place: dict[str, int] = {}  # of its original bytes
        self._reasons: dict[str, dict[str, Any]] = {}  # faults that differ in numbers alone are one reason
        self.rejected = 0

    def add(self, item: Item, fault: RecordError) -> None:
        """Write a fault down. Several of one item (a flattened list's) share its original bytes, on one line of their own."""
        if item is not self._item:
            self._item, self._place = item, {"offset": self._originals.tell(), "bytes": len(item.original)}
            self._originals.write(item.original.removesuffix(b"\n").replace(b"\n", b" ") + b"\n")
        self.rejected += 1
        row = {"file": item.file, "line": item.line, "field": _short(fault.field), "reason": _short(fault.reason)}
        kind = _NUMBER.sub("\0", f"{row['field']}: {row['reason']}")
        self._reasons.setdefault(kind, row | {"count": 0})["count"] += 1
        self._rows.write(row | self._place)

    def summary(self) -> list[dict[str, Any]]:
        """Return the reasons by frequency, each with its first record's words and place; the rarest share one row."""
        rows = sorted(self._reasons.values(), key=lambda row: -row["count"])
        if rest := rows[MAX_SUMMARY_ROWS:]:
            count = sum(row["count"] for row in rest)
            rows[MAX_SUMMARY_ROWS:] = [rest[0] | {"field": "", "reason": "other reasons", "count": count}]
        return rows


def sort(name: str, settings: dict[str, Any], items: Iterable[Item], out: Path) -> dict[str, Any]:
    """Write OUTPUTS beside the manifest `out`, which is removed first, since it is of other files.

    Returns, for the manifest, how many records went where, why (`rejects`), and what each step of `align` did.
    Raises ValueError if too many records are rejected, or if none is left to train on.
    """
    aligners = pipeline.parse(name, settings.get("align", []))

    def check(record: Record) -> Record:
        to_messages_or_text(record, settings.get(UNANSWERED, False))
        record.pop(ANSWER_IDS, None)  # tokens of whichever target gave the answers
        return record

    # The last step, so that a fault says in which element of a flattened list it is.
    steps = [*aligners, pipeline.Aligner("format", check)]
    counts, read = dict.fromkeys((*KEPT, "filtered"), 0), 0
    remove_strays(*(out.parent / file for file in OUTPUTS))
    out.unlink(missing_ok=True)
    with ExitStack() as stack:
        beside = {file: stack.enter_context(new_file(out.parent / file)) for file in OUTPUTS}
        lines = (*KEPT.values(), ROWS)
        writers = {file: stack.enter_context(jsonlines.open(beside[file], mode="w", dumps=jsonl.encode)) for file in lines}
        rejects = Rejects(writers[ROWS], stack.enter_context(beside[ORIGINALS].open("wb")))
        for item in tqdm(items, desc=name, disable=None):
            read += 1
            key, error, by = item.key, item.error, settings.get("held_out_by", "")
            if by and item.record is not None:
                key = jsonl.encode(found(item.record, by)).encode()
                error = RecordError(by, "is missing or null in the source; held_out_by names it") if key == NULL else None
            place = "held_out" if is_held_out(key, settings["held_out"]) else "train"
            # Records in a known format, faults, None for each that is filtered out.
            for outcome in [error] if error or item.record is None else pipeline.apply(steps, item.record):
                if isinstance(outcome, RecordError):
                    rejects.add(item, outcome)
                elif outcome is None:
                    counts["filtered"] += 1
                else:
                    writers[KEPT[place]].write(outcome)
                    counts[place] += 1
    made = sum(each.tally[pipeline.MADE] - each.tally[pipeline.FLATTENED] for each in aligners)
    records = {**counts, "rejected": rejects.rejected, "read": read, "made": made}
    assert read + made == sum(counts.values()) + rejects.rejected, records
    _refuse(name, settings, out.parent, records, rejects)
    tallies = {each.key: dict(each.tally) for each in aligners}
    return {"records": records, "rejects": rejects.summary(), "align": tallies}


def _refuse(name: str, settings: dict[str, Any], folder: Path, records: dict[str, int], rejects: Rejects) -> None:
    rejected, total = records["rejected"], records["read"] + records["made"]
    allowed = settings.get("max_rejected", 1)
    if rejected > allowed * total:
        why = f"{rejected:,} of {total:,} records rejected, more than max_rejected allows ({allowed:.2%})"
        fix = f"Correct them, or align them (data.{name}.align), or allow more (data.{name}.max_rejected)"
    elif not records["train"]:
        why = f"no record left to train on: {records}"
        fix = f"Correct the source, or its settings under data.{name}"
    else:
        return
    lines = [f"data.{name}: {why}"]
    lines += [
        f"  {reason['count']:,} x {reason['field']}: {reason['reason']} (first: {reason['file']}, line {reason['line']})"
        for reason in rejects.summary()
    ]
    if rejected:
        lines.append(f"Each fault: {folder / ROWS}; the original bytes: {folder / ORIGINALS}")
    raise ManyLinesError(*lines, fix)
