"""Records from files of every kind, one at a time, each with its place and with what is wrong with it.

JSON Lines (.jsonl, or a .json file whose first line is an object); an array of objects (.json); both also compressed
(.gz, .zst); Parquet (.parquet). An array is held in memory whole; of all other files, a line or some rows.

A byte order mark before a record, CRLF and blank lines are skipped: they hold no record. A file without records is logged. It
is an error if nobody can know how many records of a file are missing.
"""

import glob
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.data.read.record_checks import RecordError
from longspec.distributed import log
from longspec.shown import one_line

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ARCHIVE = ".zip"  # of the hub, fetched whole; prompts are read from a file in it (longspec.measure.prompt_files)
KNOWN = "*.jsonl, *.json (both also .gz or .zst) or *.parquet"
PIECE = 1 << 20  # bytes read at once
BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"
BATCH = 8 << 20  # bytes of Parquet's rows to decode at once, by the file's own average
ENCODE = json.JSONEncoder(sort_keys=True, allow_nan=False).encode
WITHOUT = json.JSONEncoder(sort_keys=True, allow_nan=False, default=lambda _: None).encode  # null for what JSON cannot hold
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Item:
    """Hold one thing that was read: a record, or a fault (`error`), or neither if a setting left it out."""

    file: str
    line: int  # of JSON Lines; in every other kind of file the record's number; from 1
    key: bytes  # decides whether it is held out
    record: dict[str, Any] | None
    original: bytes = b""  # as in the file; empty if it is too large
    error: RecordError | None = None


def files_of(source: str | list[str]) -> list[Path]:
    """Return the files that a path, a glob or a list of these names, sorted, each once.

    Raises ValueError for a name without a file, for a folder, and for a file of no known kind.
    """
    found: set[Path] = set()
    for name in [source] if isinstance(source, str) else source:
        if Path(name).is_dir():
            raise ValueError(f"{one_line(name)}: is a folder; name its files, for instance {one_line(Path(name))}/*.jsonl")
        # Path.glob also finds hidden files, such as those still being written.
        some = [name] if Path(name).is_file() else glob.glob(name, recursive=True)  # noqa: PTH207
        if not some:
            raise ValueError(f"{one_line(name)}: no such file; a data source is stdlib, puzzles, hf:<name> or files: {KNOWN}")
        found |= {Path(each) for each in some if not Path(each).is_dir()}
    return [path for path in sorted(found) if kind_of(path)]


def kind_of(path: Path) -> tuple[str, str]:
    """Return a file's kind (.jsonl, .json or .parquet) and compression (gzip, zstd or ''), by its name. Raises ValueError."""
    compression = COMPRESSIONS.get(path.suffix, "")
    kind = path.with_suffix("").suffix if compression else path.suffix
    if kind not in (".jsonl", ".json") and (kind, compression) != (".parquet", ""):
        raise ValueError(f"{one_line(path)}: of no known kind; known by their names: {KNOWN}")
    return kind, compression


def read(path: Path, limit: int) -> Iterator[Item]:
    """Yield all items of a file; a line or row of more than `limit` bytes becomes a fault.

    Raises ValueError if the file is cut off, or corrupt between records.
    """
    kind, compression = kind_of(path)
    if kind == ".parquet":
        yield from _rows(path, limit)
        return
    with _open_bytes(path, compression) as handle:
        is_array = kind == ".json" and handle.peek(PIECE).removeprefix(BOM).lstrip().startswith(b"[")
        records = 0
        for item in _values(path, handle.read(), limit) if is_array else _lines(path, handle, limit):
            records += 1
            yield item
        if not records:
            log(f"WARNING {path}: holds no record")


@contextmanager
def _open_bytes(path: Path, compression: str) -> Iterator[io.BufferedReader]:
    """Yield the decompressed bytes. Raises ValueError if the file is cut off, corrupt, or not what its name says."""
    import pyarrow as pa  # not above, as in _rows

    if compression and not path.stat().st_size:
        raise ValueError(f"{path}: is empty, which no compressed file is; get it again")
    try:
        # pyarrow's streams, unlike the zstandard library's, raise an error for a stream that is cut off.
        with io.BufferedReader(pa.input_stream(str(path), compression=compression or None), PIECE) as reader:
            yield reader
    except OSError as error:
        long = ", or make it without --long" if compression == "zstd" else ""
        raise ValueError(f"{path}: {error}; it is cut off or corrupt, so records are missing: get it again{long}") from error


def _item(path: Path, number: int, original: bytes, content: bytes, cut: str = "") -> Item:
    """Return an item. content: the original without what stands around a record; cut: a text to add to its fault."""
    content = content.removeprefix(BOM)
    try:
        return Item(str(path), number, content, jsonl.parse(content), original)
    except ValueError as error:
        return Item(str(path), number, content, None, original, RecordError("line", f"{error}{cut}"))


def _lines(path: Path, handle: io.BufferedReader, limit: int) -> Iterator[Item]:
    number = 0
    while line := handle.readline(limit + 1):
        number += 1
        if len(line) > limit:
            while line and not line.endswith(b"\n"):
                line = handle.readline(PIECE)
            yield _too_long(path, number, "line", limit)
        elif line.strip(SPACE):
            cut = "" if line.endswith(b"\n") else "; the file ends in the middle of this line"
            yield _item(path, number, line, line.rstrip(b"\r\n"), cut)


def _values(path: Path, content: bytes, limit: int) -> Iterator[Item]:
    """Yield the values of a JSON array; a value that is no record becomes a fault.

    Raises ValueError for invalid JSON, and for text behind the array: nobody knows how many records are missing then.
    """
    # One byte is one character: what parts values is ASCII, and a value's own bytes are read as UTF-8 with its record.
    text, number = content.decode("latin-1"), 0
    at = _behind_space(text, text.index("[") + 1)
    bracket = at if text.startswith("]", at) else None
    while bracket is None:
        number += 1
        try:
            _, end = _DECODER.raw_decode(text, at)
            behind = _behind_space(text, end)
            if not text.startswith((",", "]"), behind):
                raise ValueError("neither a comma nor a bracket is behind it")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: record {number}: {error}; it is broken, or cut off by the end of the file: mend it (jq shows where), "
                "or get the file again"
            ) from error
        original = content[at:end]
        yield _item(path, number, original, original) if len(original) <= limit else _too_long(path, number, "record", limit)
        bracket, at = behind if text[behind] == "]" else None, _behind_space(text, behind + 1)
    if text[bracket + 1 :].strip():
        raise ValueError(f"{path}: text after the end of the array; JSON Lines belong in a .jsonl file")


def _behind_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _too_long(path: Path, number: int, what: str, limit: int) -> Item:
    fault = RecordError(what, f"is longer than {limit / 1e6:g} MB (max_line_mb)")
    return Item(str(path), number, b"", None, error=fault)


def _rows(path: Path, limit: int) -> Iterator[Item]:
    """Yield the rows of a Parquet file, some at a time; a row of more than `limit` bytes as JSON becomes a fault.

    What JSON cannot hold (a time, bytes, a decimal, NaN, text that is no UTF-8) is left out, and the log counts it by column.
    Of messages and the like only the time or bytes are left out, else the whole cell. All else decides whether the record is
    held out. Nulls within cells are dropped from the record: Parquet has one for each field of another record. Raises
    ValueError if the file is cut off or corrupt, or if it names a column twice.
    """
    import pyarrow as pa  # not above: Snakemake imports this module for every plan, and needs no pyarrow
    import pyarrow.parquet as pq

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
                    yield _row(path, number, batch, place, limit, left_out)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}; no whole Parquet file, so records are missing: get it again") from error
    for name, count in left_out.items():
        log(f"WARNING {path}: column {name} left out of {count} records, or a part of it: JSON cannot hold it")


def _row(path: Path, number: int, batch: Any, place: int, limit: int, left_out: Counter[str]) -> Item:
    """Return the item of one row, without what JSON cannot hold, or with a fault if the row is too long."""
    values = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value = column[place].as_py()
            try:
                ENCODE(value)
            except TypeError:
                left_out[name] += 1
                if not isinstance(value, dict | list):
                    continue
                value = json.loads(WITHOUT(value))
            values[name] = value
        except (ValueError, TypeError, OverflowError):  # NaN, no UTF-8; a type such as UUID; a date far away
            left_out[name] += 1
    # A row has no bytes of its own in the file; as JSON with sorted keys it can be corrected and fed back.
    text = ENCODE(values).encode()
    if len(text) > limit:
        return _too_long(path, number, "row", limit)
    return Item(str(path), number, text, {name: _without_nulls(value) for name, value in values.items()}, text)


def _without_nulls(value: Any) -> Any:
    """Return a value without nulls: in a struct, Parquet has one for each field of other records."""
    if isinstance(value, dict):
        return {name: _without_nulls(held) for name, held in value.items() if held is not None}
    return [_without_nulls(held) for held in value] if isinstance(value, list) else value
