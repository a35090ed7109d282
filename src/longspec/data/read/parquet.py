"""The rows of a Parquet file as records, a few at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspec.data.read.items import Item
from longspec.data.read.records import RecordError

BATCH = 8 << 20  # bytes of rows decoded at once, by the file's own average


def read(path: Path) -> Iterator[Item]:
    """The rows, numbered through. Raises ValueError for a file that is cut off, corrupt or names a column twice.

    Memory: what pyarrow needs for a row group's pages, and some rows. A column's values of one row are as large as they
    are: `max_line_mb` bounds lines, of which this file has none.
    """
    # Not above: Snakemake imports the readers for every plan.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffered: without it pyarrow reads all of a row group's columns before the first row.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: names a column twice: {', '.join(names)}; rename one")
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
            average = sum(groups) / max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=max(1, min(1024, int(BATCH / max(1.0, average))))):
                for row in _rows(batch):
                    number += 1
                    yield _item(str(path), number, row)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}; no whole Parquet file, so records are missing: get it again") from error


def _rows(batch: Any) -> Iterator[dict[str, Any] | RecordError]:
    """Each row, or what keeps it from being one."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            yield _row(batch.slice(number, 1))


def _row(batch: Any) -> dict[str, Any] | RecordError:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[0].as_py()
        except UnicodeDecodeError as error:
            return RecordError(name, f"is not UTF-8: {error.reason} at byte {error.start + 1}")
    return row


def _item(file: str, number: int, row: dict[str, Any] | RecordError) -> Item:
    if isinstance(row, RecordError):
        return Item(file, number, b"", None, error=row)
    # A row has no bytes of its own in the file: as JSON, keys sorted, it can be corrected and fed back.
    text = json.dumps(row, sort_keys=True, default=str).encode()
    return Item(file, number, text, row, (text,))
