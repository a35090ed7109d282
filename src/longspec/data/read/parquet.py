"""The rows of a Parquet file as records, a few at a time.

Parquet holds more than JSON does. A column of a type that JSON has not (times, bytes, decimals) is read only when the formats
or an aligner ask for it. Of the other columns a cell that JSON cannot hold (NaN, text that is no UTF-8) is a fault only when
they ask for its column; else it is left out of its record. Both are noted.

All columns that JSON can hold are read, asked for or not: they decide whether a record is held out, which must not hang on
how a dataset is aligned, and they stay in the record, as the other fields of a line do.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longspec.data.read.items import Item, Notes
from longspec.data.read.record_checks import RecordError

BATCH = 8 << 20  # bytes of rows decoded at once, by the file's own average
UNREADABLE = (ValueError, OverflowError)  # no UTF-8, a time beyond Python's
_encode = json.JSONEncoder(sort_keys=True, allow_nan=False).encode


def read(path: Path, limit: int, asked: set[str] | None, notes: Notes) -> Iterator[Item]:
    """Yield the rows, numbered through; `asked`: the fields that the formats and aligners look at, None for all.

    A row whose values take more than `limit` bytes is a fault. Raises ValueError for a file that is cut off, corrupt or names
    a column twice. Memory: what pyarrow needs for a row group's pages, and some rows.
    """
    try:
        # Buffered: without it pyarrow reads all of a row group's columns before the first row.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names, number = file.schema_arrow.names, 0
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: names a column twice: {', '.join(names)}; rename one")
            beyond = {field.name: field.type for field in file.schema_arrow if _holds_beyond_json(field.type)}
            asked = set(names) if asked is None else asked
            unread = [name for name in beyond if name not in asked]
            for name in unread:
                why = "is not read: JSON has no such type, and nothing asks for it"
                notes.add(path, f"column {name} ({beyond.pop(name)}) {why}", 1)
            columns = [name for name in names if name not in unread] if unread else None
            size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))
            rows = max(1, min(1024, BATCH * file.metadata.num_rows // max(1, size)))
            for batch in map(_without_dictionaries, file.iter_batches(batch_size=rows, columns=columns)):
                whole = _decoded(batch, limit)
                for place in range(batch.num_rows):
                    number += 1
                    if whole and not beyond and (text := _json(whole[place])):
                        # A row has no bytes of its own in the file: as JSON, keys sorted, it can be corrected and fed back.
                        yield Item(str(path), number, text, whole[place], (text,))
                        continue
                    alone = batch.slice(place, 1)
                    if alone.nbytes > limit:
                        yield _too_large(path, number, alone, limit)
                    else:
                        yield _sorted_out(path, number, alone, beyond.keys(), asked, notes)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}; no whole Parquet file, so records are missing: get it again") from error


def _holds_beyond_json(kind: pa.DataType) -> bool:
    """Tell whether values of a type are, or hold, some that JSON has not: bytes, times, decimals."""
    if pa.types.is_nested(kind):
        return any(_holds_beyond_json(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return _holds_beyond_json(kind.value_type)
    tests = (pa.types.is_temporal, pa.types.is_decimal, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in (*tests, pa.types.is_fixed_size_binary, pa.types.is_binary_view))


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch in which no row counts a dictionary, which holds what other rows hold."""
    if not any(map(pa.types.is_dictionary, batch.schema.types)):
        return batch  # a batch without columns has rows, which from_arrays cannot know
    plain = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(plain, batch.schema.names)


def _decoded(batch: pa.RecordBatch, limit: int) -> list[dict[str, Any]] | None:
    """All rows; None where one may be too large for that, or holds a cell that cannot be read."""
    try:
        return batch.to_pylist() if batch.nbytes <= limit else None
    except UNREADABLE:
        return None


def _too_large(path: Path, number: int, row: pa.RecordBatch, limit: int) -> Item:
    """A fault with a large row's place and its columns' sizes, without a part of it, which might be taken for the whole."""
    sizes = {name: row.column(name).nbytes for name in row.schema.names}
    place = {"file": str(path), "row": number, "bytes": sizes}
    fault = RecordError("row", f"holds more than {limit / 1e6:g} MB (max_line_mb)")
    return Item(str(path), number, b"", None, (json.dumps(place).encode(),), fault)


def _sorted_out(path: Path, number: int, row: pa.RecordBatch, beyond: Collection[str], asked: set[str], notes: Notes) -> Item:
    """The item of a row of which JSON may not hold some cells: without those that nothing asks for."""
    values: dict[str, Any] = {}
    faults: dict[str, RecordError] = {}
    for name in row.schema.names:
        try:
            values[name] = row.column(name)[0].as_py()
        except UNREADABLE as error:
            values[name], faults[name] = None, RecordError(name, f"cannot be read: {error}")
    unholdable = {name for name, value in values.items() if name in faults or _json(value) is None}
    for name in [name for name in values if name in unholdable and name not in asked]:
        notes.add(path, f"column {name}: JSON cannot hold a value; left out of its record, as nothing asks for it", number)
        del values[name]
        faults.pop(name, None)
    key = _json({name: value for name, value in values.items() if name not in unholdable and name not in beyond})
    assert key is not None
    original = json.dumps(values, sort_keys=True, default=_as_text).encode()
    fault = next(iter(faults.values()), None)
    return Item(str(path), number, key, None if fault else values, (original,), fault)


def _json(value: Any) -> bytes | None:
    """A value as JSON, keys sorted; None when JSON cannot hold it."""
    try:
        return _encode(value).encode()
    except (ValueError, TypeError, RecursionError):
        return None


def _as_text(value: Any) -> str:
    """A value that JSON has not, to be looked at."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
