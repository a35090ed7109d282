"""The rows of a Parquet file as records, a few at a time.

Parquet holds more than JSON does. A cell that JSON cannot hold (a time, bytes, a decimal, NaN, text that is no UTF-8) is left
out of its record, and the log counts such cells by column. All others stay in the record and decide whether it is held out.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longspec.data.read.record_checks import RecordError
from longspec.data.read.source_files import Item

BATCH = 8 << 20  # bytes of rows decoded at once, by the file's own average
_encode = json.JSONEncoder(sort_keys=True, allow_nan=False).encode


def read(path: Path, limit: int) -> Iterator[Item]:
    """Yield the rows, numbered through; one that is longer than `limit` bytes as JSON is a fault.

    Raises ValueError for a file that is cut off, corrupt or names a column twice. Memory: what pyarrow needs for a row group's
    pages, and some rows.
    """
    number, left_out = 0, Counter[str]()
    try:
        # Buffered: without it pyarrow reads all of a row group's columns before the first row.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: names a column twice: {', '.join(names)}; rename one")
            size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))
            for batch in file.iter_batches(max(1, min(1024, BATCH * file.metadata.num_rows // max(1, size)))):
                for place in range(batch.num_rows):
                    number += 1
                    yield _item(path, number, batch, place, limit, left_out)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}; no whole Parquet file, so records are missing: get it again") from error
    for name, count in left_out.items():
        logging.getLogger(__name__).warning("%s: column %s left out of %d records: JSON cannot hold it", path, name, count)


def _item(path: Path, number: int, batch: pa.RecordBatch, place: int, limit: int, left_out: Counter[str]) -> Item:
    """Return the item of one row: without the cells that JSON cannot hold, or a fault for a long one."""
    values = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value = column[place].as_py()
            _encode(value)
            values[name] = value
        except (ValueError, TypeError):  # NaN, text that is no UTF-8; a type such as UUID
            left_out[name] += 1
    # A row has no bytes of its own in the file: as JSON, keys sorted, it can be corrected and fed back.
    text = _encode(values).encode()
    if len(text) > limit:
        return Item(str(path), number, b"", None, error=RecordError("row", f"is longer than {limit / 1e6:g} MB (max_line_mb)"))
    return Item(str(path), number, text, values, text)
