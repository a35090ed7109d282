"""Records from files of every kind, one at a time, with the place each comes from and what is wrong with it.

JSON Lines (.jsonl, or a .json file whose first line is an object); an array of objects (.json); both also compressed
(.gz, .zst); Parquet (.parquet). Memory is bounded by the longest line allowed, whatever the file's size.

Read without loss, and noted: a byte order mark before a line, CRLF line ends, blank lines (they hold no record, so they are
no record read), a file without records. A file of which nobody can know how many records are missing is an error.
"""

import glob
import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from longspec import jsonl
from longspec.data.read import parquet
from longspec.data.read.items import Item, Note, Notes
from longspec.data.read.json_stream import BOM, PIECE, Element, JsonArray, gather, line_pieces
from longspec.data.read.record_checks import RecordError
from longspec.shown import one_line

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ARCHIVE = ".zip"  # of the hub: fetched whole; of a file in it prompts are read (longspec.measure.prompt_files)
KNOWN = "*.jsonl, *.json (both also .gz or .zst) or *.parquet"
# The first bytes of a file that may carry a wrong name.
SIGNATURES = {
    b"\x1f\x8b": ("gzip-compressed", ".gz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", ".zst"),
    b"PAR1": ("Parquet", ".parquet"),
}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
HAS_BOM = "a byte order mark before the record; read without it"
HAS_CRLF = "the line ends in CRLF; read without it"
IS_BLANK = "a blank line, which holds no record; passed over"
HOLDS_NONE = "the file holds no record"


def files_of(source: str | list[str]) -> list[Path]:
    """The files that a path, a glob or a list of these names, sorted. Raises ValueError for a name without a file.

    Also for a folder, a file of no known kind, and one that is named twice.
    """
    found: list[Path] = []
    for name in [source] if isinstance(source, str) else source:
        if Path(name).is_dir():
            raise ValueError(
                f"{one_line(name)}: is a folder; name its files, for instance {one_line(name).rstrip('/')}/*.jsonl"
            )
        # Path.glob also finds hidden files, such as those still being written.
        some = [name] if Path(name).is_file() else glob.glob(name, recursive=True)  # noqa: PTH207
        if not some:
            raise ValueError(f"{one_line(name)}: no such file; a data source is stdlib, puzzles, hf:<name> or files: {KNOWN}")
        found += (Path(each) for each in some if not Path(each).is_dir())
    for path in found:
        kind_of(path)
        if not path.is_file():  # a glob finds these too, and opening a pipe would wait for ever
            raise ValueError(f"{one_line(path)}: is no regular file (a broken link, a pipe, a device); mend or remove it")
        if found.count(path) > 1:
            raise ValueError(f"{one_line(path)}: named twice in {one_line(source)}; its records would count twice")
    return sorted(found)


def kind_of(path: Path) -> tuple[str, str]:
    """A file's kind (.jsonl, .json or .parquet) and compression (gzip, zstd or none: ''), by its name."""
    compression = COMPRESSIONS.get(path.suffix, "")
    kind = path.with_suffix("").suffix if compression else path.suffix
    if kind not in (".jsonl", ".json") and (kind, compression) != (".parquet", ""):
        raise ValueError(f"{one_line(path)}: of no known kind; known by their names: {KNOWN}")
    return kind, compression


def read(path: Path, limit: int, asked: set[str] | None = None) -> Iterator[Item | Note]:
    """Yields all items of a file, then the notes on it; a line or row of more than `limit` bytes is a fault of its own.

    `asked`: the fields that anybody looks at, None for all; only the Parquet reader treats others differently. Raises
    ValueError for a file that is cut off or corrupt between records.
    """
    kind, compression = kind_of(path)
    if kind == ".parquet":
        yield from parquet.read(path, limit, asked)
        return
    notes = Notes(str(path))
    with open_bytes(path, compression) as handle:
        is_array = kind == ".json" and handle.peek(PIECE).removeprefix(BOM).lstrip().startswith(b"[")
        for at, item in enumerate((_values if is_array else _lines)(handle, notes, limit)):
            if at == 0 and item.error and kind == ".json" and not is_array:  # perhaps an object over several lines
                told = f"{path}: line {item.line}: {item.error.reason}, and the file is no array"
                raise ValueError(f"{told}; write an array of objects, or one object a line (jq -c . FILE > FILE.jsonl)")
            yield item
    yield from notes.found.values()


@contextmanager
def open_bytes(path: Path, compression: str) -> Iterator[io.BufferedReader]:
    """The decompressed bytes. Raises ValueError when the file is cut off, corrupt, or not what its name says."""
    import pyarrow as pa  # not above: Snakemake imports this module for every plan

    with path.open("rb") as handle:
        start = handle.read(4)
    if compression and not start:
        raise ValueError(f"{path}: is empty, which no compressed file is; get it again")
    for signature, (what, suffix) in SIGNATURES.items():
        if start.startswith(signature) and path.suffix != suffix:
            raise ValueError(f"{path}: is {what} by its first bytes; its name must end in {suffix}")
    try:
        # pyarrow's streams, unlike the zstandard library's, raise an error for a stream that is cut off.
        with io.BufferedReader(pa.input_stream(str(path), compression=compression or None), PIECE) as reader:
            if reader.peek(2)[:2] in UTF_16:
                raise ValueError(f"{path}: is UTF-16 by its first bytes; convert it: iconv -f UTF-16 -t UTF-8")
            yield reader
    except OSError as error:
        raise ValueError(f"{path}: {error}; it is cut off or corrupt, so records are missing: get it again") from error


class _Maker:
    def __init__(self, notes: Notes, limit: int) -> None:
        self._notes, self._limit = notes, limit

    def item(self, element: Element, number: int, content: bytes, cut: str = "") -> Item:
        """`content`: the element without what stands around a record; `cut`: what is added to its fault."""
        file = self._notes.file
        if element.rest is not None:
            fault = RecordError("line", f"is longer than {self._limit / 1e6:g} MB (max_line_mb)")
            return Item(file, number, b"", None, chain((element.content,), element.rest), fault)
        if content.startswith(BOM):
            content = content.removeprefix(BOM)
            self._notes.add(HAS_BOM, number)
        try:
            return Item(file, number, content, jsonl.parse(content), (element.content,))
        except ValueError as error:
            return Item(file, number, content, None, (element.content,), RecordError("line", f"{error}{cut}"))


def _lines(handle: io.BufferedReader, notes: Notes, limit: int) -> Iterator[Item]:
    maker = _Maker(notes, limit)
    number = records = 0
    for number, element in enumerate(gather(line_pieces(handle), limit), 1):
        line, whole = element.content, element.rest is None
        if whole and line.endswith(b"\r\n"):
            notes.add(HAS_CRLF, number)
        if whole and not line.strip(b" \t\r\n"):
            notes.add(IS_BLANK, number)
            continue
        records += 1
        cut = "" if line.endswith(b"\n") else "; the file ends in the middle of this line"
        yield maker.item(element, number, line.rstrip(b"\r\n"), cut)
    if not records:
        notes.add(HOLDS_NONE, number)


def _values(handle: io.BufferedReader, notes: Notes, limit: int) -> Iterator[Item]:
    maker = _Maker(notes, limit)
    if handle.peek(len(BOM)).startswith(BOM):
        handle.read(len(BOM))
        notes.add(HAS_BOM, 1)
    number = 0
    for number, element in enumerate(gather(JsonArray(handle, notes.file).pieces(), limit), 1):
        yield maker.item(element, number, element.content.strip())
    if not number:
        notes.add(HOLDS_NONE, number)
