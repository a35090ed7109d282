"""The rows of a Parquet file as records, a few at a time.

Parquet holds more than JSON does. Columns of types that JSON has not (times, bytes, decimals) are not read, and a cell that
JSON cannot hold (NaN, text that is no UTF-8) is left out of its record. Both are noted.

All other columns are read: they decide whether a record is held out, and stay in it, as the other fields of a line do.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longspec.data.read.items import Item, Notes
from longspec.data.read.record_checks import RecordError

BATCH = 8 << 20  # bytes of rows decoded at once, by the file's own average
BEYOND_JSON = (ValueError, TypeError)  # NaN, text that is no UTF-8; a type such as UUID
_encode = json.JSONEncoder(sort_keys=True, allow_nan=False).encode
_encode_unescaped = json.JSONEncoder(ensure_ascii=False).encode


def read(path: Path, limit: int, notes: Notes) -> Iterator[Item]:
    """Yield the rows, numbered through; one that is longer than `limit` bytes as JSON is a fault.

    Raises ValueError for a file that is cut off, corrupt or names a column twice. Memory: what pyarrow needs for a row group's
    pages, and some rows.
    """
    try:
        # Buffered: without it pyarrow reads all of a row group's columns before the first row.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            schema, number = file.schema_arrow, 0
            if len(set(schema.names)) < len(schema.names):
                raise ValueError(f"{path}: names a column twice: {', '.join(schema.names)}; rename one")
            unread = {field.name: field.type for field in schema if _holds_beyond_json(field.type)}
            for name, kind in unread.items():
                notes.add(path, f"column {name} ({kind}) is not read: JSON has no such type", 1)
            columns = [name for name in schema.names if name not in unread] if unread else None
            size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))
            rows = max(1, min(1024, BATCH * file.metadata.num_rows // max(1, size)))
            for batch in file.iter_batches(batch_size=rows, columns=columns):
                for place in range(batch.num_rows):
                    number += 1
                    yield _item(path, number, batch, place, limit, notes)
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


def _item(path: Path, number: int, batch: pa.RecordBatch, place: int, limit: int, notes: Notes) -> Item:
    """Return the item of one row: without the cells that JSON cannot hold, or a fault for a long one."""
    values = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value = column[place].as_py()
            _encode(value)
            values[name] = value
        except BEYOND_JSON:
            notes.add(path, f"column {name}: JSON cannot hold a value; left out of its record", number)
    # A row has no bytes of its own in the file: as JSON, keys sorted, it can be corrected and fed back.
    text = _encode(values).encode()
    if len(text) > limit and len(_encode_unescaped(values).encode()) > limit:
        return Item(str(path), number, b"", None, error=RecordError("row", f"is longer than {limit / 1e6:g} MB (max_line_mb)"))
    return Item(str(path), number, text, values, text)
