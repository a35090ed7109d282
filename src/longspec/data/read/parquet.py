"""The rows of a Parquet file as records, a few at a time.

Parquet holds more than JSON does. A column of a type that JSON has not (times, bytes, decimals) is read only when the formats
or an aligner ask for it. Of the other columns a cell that JSON cannot hold (NaN, text that is no UTF-8) is a fault only when
they ask for its column; else it is left out of its record. Both are noted.

All columns that JSON can hold are read, asked for or not: they decide whether a record is held out, which must not hang on
how a dataset is aligned, and they stay in the record, as the other fields of a line do.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longspec.data.read.items import Item, Note, Notes
from longspec.data.read.record_checks import RecordError

BATCH = 8 << 20  # bytes of rows decoded at once, by the file's own average
_encode = json.JSONEncoder(sort_keys=True, allow_nan=False).encode


def read(path: Path, limit: int, asked: set[str] | None = None) -> Iterator[Item | Note]:
    """The rows, numbered through, then the notes; `asked`: the fields that the formats and aligners look at, None for all.

    A row whose values take more than `limit` bytes is a fault. Raises ValueError for a file that is cut off, corrupt or names
    a column twice. Memory: what pyarrow needs for a row group's pages, and some rows.
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
            maker = _Maker(str(path), limit, (lambda _: True) if asked is None else asked.__contains__)
            columns = [field.name for field in file.schema_arrow if maker.is_read(field)]
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
            average = sum(groups) / max(1, file.metadata.num_rows)
            rows = max(1, min(1024, int(BATCH / max(1.0, average))))
            number = 0
            for batch in file.iter_batches(batch_size=rows, columns=None if columns == names else columns):
                for row in _rows(batch, limit):
                    number += 1
                    yield maker.item(number, row)
            yield from maker.notes.found.values()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}; no whole Parquet file, so records are missing: get it again") from error


def _rows(batch: Any, limit: int) -> Iterator[dict[str, Any] | Any]:
    """Each row as a dict; as a batch of one where it is too large for that, or a cell of it cannot be read."""
    whole = _decoded(batch) if batch.nbytes <= limit else None
    if whole is not None:
        yield from whole
        return
    for number in range(batch.num_rows):
        alone = batch.slice(number, 1)
        row = _decoded(alone) if _size_of(alone) <= limit else None
        yield alone if row is None else row[0]


def _decoded(batch: Any) -> list[dict[str, Any]] | None:
    """All rows of a batch; None when one holds what cannot be read."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):  # no UTF-8, a time beyond Python's
        return None
    return rows


def _size_of(row: Any) -> int:
    """Bytes that the values of a batch of one row take, without a dictionary, which holds what other rows hold."""
    import pyarrow as pa

    plain = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in row.columns]
    return sum(column.nbytes for column in plain)


def _holds_beyond_json(kind: Any) -> bool:
    """Whether values of a pyarrow type are, or hold, some that JSON has not: bytes, times, decimals."""
    import pyarrow as pa

    if pa.types.is_nested(kind):
        return any(_holds_beyond_json(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return _holds_beyond_json(kind.value_type)
    tests = (pa.types.is_temporal, pa.types.is_decimal, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in (*tests, pa.types.is_fixed_size_binary, pa.types.is_binary_view))


class _Maker:
    def __init__(self, file: str, limit: int, is_asked: Callable[[str], bool]) -> None:
        self._file, self._limit, self._is_asked = file, limit, is_asked
        self._beyond: set[str] = set()  # columns that are read though JSON has not their type
        self.notes = Notes(file)

    def is_read(self, field: Any) -> bool:
        """Whether a column is; noted when it is not."""
        if not _holds_beyond_json(field.type):
            return True
        if self._is_asked(field.name):
            self._beyond.add(field.name)
            return True
        self.notes.add(f"column {field.name} ({field.type}) is not read: JSON has no such type, and nothing asks for it", 1)
        return False

    def item(self, number: int, row: dict[str, Any] | Any) -> Item:
        """The item of a row."""
        if isinstance(row, dict):
            if not self._beyond and (text := _json(row)):
                # A row has no bytes of its own in the file: as JSON, keys sorted, it can be corrected and fed back.
                return Item(self._file, number, text, row, (text,))
            return self._sorted_out(number, row, {})
        if _size_of(row) > self._limit:
            return self._too_large(number, row)
        values, faults = {}, {}
        for name in row.schema.names:
            try:
                values[name] = row.column(name)[0].as_py()
            except (ValueError, OverflowError) as error:
                values[name], faults[name] = None, _why(error)
        return self._sorted_out(number, values, faults)

    def _too_large(self, number: int, row: Any) -> Item:
        """A fault with a large row's place and its columns' sizes, without a part of it, which might be taken for the whole."""
        sizes = {name: _size_of(row.select([name])) for name in row.schema.names}
        place = {"file": self._file, "row": number, "bytes": sizes}
        fault = RecordError("row", f"holds more than {self._limit / 1e6:g} MB (max_line_mb)")
        return Item(self._file, number, b"", None, (json.dumps(place).encode(),), fault)

    def _sorted_out(self, number: int, values: dict[str, Any], faults: dict[str, str]) -> Item:
        """The item of a row of which JSON may not hold some cells: without those that nothing asks for."""
        unholdable = {name for name, value in values.items() if name in faults or _json(value) is None}
        for name in [name for name in values if name in unholdable and not self._is_asked(name)]:
            self.notes.add(f"column {name}: JSON cannot hold a value; left out of its record, as nothing asks for it", number)
            del values[name]
            faults.pop(name, None)
        key = _json({name: value for name, value in values.items() if name not in unholdable | self._beyond})
        assert key is not None
        original = json.dumps(values, sort_keys=True, default=_as_text).encode()
        fault = next((RecordError(name, reason) for name, reason in faults.items()), None)
        return Item(self._file, number, key, None if fault else values, (original,), fault)


def _why(error: Exception) -> str:
    """Why a cell cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: {error.reason} at byte {error.start + 1}"
    return f"cannot be read: {error}"


def _json(value: Any) -> bytes | None:
    """A value as JSON, keys sorted; None when JSON cannot hold it."""
    try:
        return _encode(value).encode()
    except (ValueError, TypeError, RecursionError):
        return None


def _as_text(value: Any) -> str:
    """A value that JSON has not, to be looked at."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
