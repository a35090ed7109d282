"""Values of Parquet cells, among them types that JSON lacks, and sizes of rows. Imports pyarrow when called alone."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One value; `shown` stands for it where it is to be looked at, `fault` says why it could not be read."""

    value: Any
    shown: Any
    fault: str | None


def holds_beyond_json(kind: Any) -> bool:
    """Whether values of a pyarrow type are, or hold, some that JSON has not: bytes, times, decimals."""
    import pyarrow as pa

    if pa.types.is_nested(kind):
        return any(holds_beyond_json(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return holds_beyond_json(kind.value_type)
    tests = (pa.types.is_temporal, pa.types.is_decimal, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in (*tests, pa.types.is_fixed_size_binary, pa.types.is_binary_view))


def size_of(row: Any) -> int:
    """Bytes that the values of a batch of one row take."""
    return sum(_decoded(column).nbytes for column in row.columns)


def _decoded(column: Any) -> Any:
    """A column without a dictionary, which holds what other rows hold."""
    import pyarrow as pa

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def whole_rows(batch: Any) -> list[dict[str, Any]] | None:
    """All rows of a batch; None when one holds what cannot be read."""
    try:
        made: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):  # no UTF-8, a time beyond Python's
        return None
    return made


def cell(column: Any) -> Cell:
    """The value of a column of one row."""
    try:
        value = column[0].as_py()
    except UnicodeDecodeError as error:
        return Cell(None, _bytes_shown(_as_bytes(column)), f"is not UTF-8: {error.reason} at byte {error.start + 1}")
    except (ValueError, OverflowError) as error:
        return Cell(None, column.to_string(), f"cannot be read: {error}")
    return Cell(value, value, None)


def _as_bytes(column: Any) -> Any:
    """The value of a column of one row, with bytes in place of text."""
    column = _decoded(column)
    return column.cast(_bytes_type(column.type))[0].as_py()


def _bytes_type(kind: Any) -> Any:
    """The pyarrow type with bytes in place of text."""
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(_bytes_type(field.type)) for field in fields])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.large_list(kind.value_field.with_type(_bytes_type(kind.value_type)))
    return kind


def _bytes_shown(value: Any) -> Any:
    """The value as text again, in which a byte that is no UTF-8 stands as \\xff."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {name: _bytes_shown(part) for name, part in value.items()}
    return [_bytes_shown(part) for part in value] if isinstance(value, list) else value
