"""One file of stored rows: a safetensors file that is written row by row, and the checksums that say which rows are there.

    rows-000064-000127.part           the file while rows are missing; each row stands in its place from the first on
    rows-000064-000127.jsonl          a line for each row that is written, after it
    rows-000064-000127.safetensors    the same file when all rows are there
    rows-000064-000127.json           the lines of all rows, written last: without it the file counts for nothing

A row counts when its line is there and its bytes fit the line's checksums, whoever was killed, and wherever. Checksums depend
on the declaration too: a row of other states that was left in the folder fits none.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from longspec.atomic_files import fsync_path, remove_strays, write_text
from longspec.states.stored.declaration import SIZES, Declaration

PART, JOURNAL, WHOLE, SUMS = ".part", ".jsonl", ".safetensors", ".json"
LEFT_OUT, ROW, ROW_SUMS = "left_out", "row", "sums"
# {"row": 7, "sums": [one a tensor]}, or of a row without states {"row": 7, "left_out": reason, "sums": [of this]}
Line = dict[str, Any]
Data = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Layout:
    """Where in the file each row's part of each tensor lies."""

    declaration: Declaration
    first: int  # number of the first row
    count: int
    header: bytes = field(init=False, repr=False)
    starts: tuple[int, ...] = field(init=False, repr=False)  # of each tensor
    sizes: tuple[int, ...] = field(init=False, repr=False)  # bytes of one row of each tensor

    def __post_init__(self) -> None:
        tensors, length, at = self.declaration.tensors, self.declaration.sequence_length, 0
        described: dict[str, Any] = {"__metadata__": {"declaration": self.declaration.hash, "first_row": str(self.first)}}
        # The widest elements first, so that each tensor begins at a multiple of its element's size.
        for tensor in sorted(tensors, key=lambda tensor: -SIZES[tensor.dtype]):
            end = at + self.count * length * tensor.token_bytes
            shape = [self.count, length, *tensor.token_shape]
            described[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        object.__setattr__(self, "header", len(text).to_bytes(8, "little") + text)
        object.__setattr__(self, "starts", tuple(begin + described[tensor.name]["data_offsets"][0] for tensor in tensors))
        object.__setattr__(self, "sizes", tuple(length * tensor.token_bytes for tensor in tensors))

    @property
    def name(self) -> str:
        """The name of the chunk's files, without their endings."""
        return f"rows-{self.first:06d}-{self.first + self.count - 1:06d}"

    @property
    def rows(self) -> range:
        """The numbers of its rows."""
        return range(self.first, self.first + self.count)

    @property
    def bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.count * sum(self.sizes)

    def checksum(self, data: Data) -> str:
        """The checksum of one row of a tensor."""
        return xxh3_64_hexdigest(data, seed=int(self.declaration.hash[:16], 16))

    def left_out(self, row: int, reason: str) -> Line:
        """The line of a row that has no states."""
        return {ROW: row, LEFT_OUT: reason, ROW_SUMS: [self.checksum(f"{row} {reason}".encode())]}

    def place(self, tensor: int, row: int) -> int:
        """Where in the file one row of a tensor begins."""
        return self.starts[tensor] + (row - self.first) * self.sizes[tensor]


def read_row(file: int, layout: Layout, line: Line, buffers: Sequence[memoryview]) -> str | None:
    """Read a row of an open file into one buffer a tensor; the tensor that is torn or fits no checksum, None: all are whole."""
    for number, (tensor, buffer) in enumerate(zip(layout.declaration.tensors, buffers, strict=True)):
        read = os.preadv(file, [buffer], layout.place(number, line[ROW]))
        if read != len(buffer) or layout.checksum(buffer) != line[ROW_SUMS][number]:
            return tensor.name
    return None


def read_lines(path: Path) -> list[Any]:
    """The whole lines of a journal that are JSON; what a kill tore off is not there."""
    found = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def is_line(layout: Layout, line: Any) -> bool:
    """Whether a value read from a file is a row's line of this chunk."""
    if not isinstance(line, dict) or type(line.get(ROW)) is not int or line[ROW] not in layout.rows:
        return False
    if LEFT_OUT in line:
        return bool(line == layout.left_out(line[ROW], line[LEFT_OUT]))
    sums = line.get(ROW_SUMS)
    return isinstance(sums, list) and len(sums) == len(layout.sizes)


def write_at(file: int, data: Data, place: int) -> None:
    """Write all of it. Raises OSError, as for a full disk."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(file, left, place)
        left, place = left[written:], place + written


class ChunkWriter:
    """A chunk in a folder: finds which of its rows are whole, takes the others, and completes it.

    check: called before anything is renamed or written down, and does not return when another job writes here.
    """

    def __init__(self, folder: Path, layout: Layout, check: Callable[[], None] = lambda: None) -> None:
        self.layout, self.check = layout, check
        self.part, self.journal, self.whole, self.sums = (
            folder / f"{layout.name}{ending}" for ending in (PART, JOURNAL, WHOLE, SUMS)
        )
        self.lines: dict[int, Line] = {}
        self._part = self._journal = -1  # open files

    @property
    def missing(self) -> list[int]:
        """Numbers of the rows that are not there yet."""
        return [row for row in self.layout.rows if row not in self.lines]

    def find(self) -> None:
        """Take over the rows that earlier builders have left whole. All bytes of the chunk are read."""
        remove_strays(self.sums, self.journal)
        file = self.whole if self.whole.exists() else self.part
        if not file.exists():
            return
        try:
            lines = json.loads(self.sums.read_bytes())["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            lines = []
        buffers = [memoryview(bytearray(size)) for size in self.layout.sizes]
        with file.open("rb") as opened:
            for line in [*(lines if isinstance(lines, list) else []), *read_lines(self.journal)]:
                if is_line(self.layout, line) and (
                    LEFT_OUT in line or read_row(opened.fileno(), self.layout, line, buffers) is None
                ):
                    self.lines[line[ROW]] = line
        if self.is_done():
            self.journal.unlink(missing_ok=True)  # of a builder that was killed before it did so

    def is_done(self) -> bool:
        """Whether nothing is to be written: all rows, the last file, and a header and a size that fit. `find` comes first."""
        if self.missing or not self.whole.exists() or self.whole.stat().st_size != self.layout.bytes:
            return False
        with self.whole.open("rb") as file:
            header = file.read(len(self.layout.header))
        return header == self.layout.header and self.sums.exists() and self.sums.read_bytes() == self._last_file().encode()

    def open(self) -> None:
        """Make the chunk one in work. Rows that were whole stay where they are."""
        self.check()
        if self.whole.exists():
            self.sums.unlink(missing_ok=True)  # first: without it the file counts for nothing
            self.whole.rename(self.part)
        self._part = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(self._part, self.layout.bytes)
        write_at(self._part, self.layout.header, 0)
        beside = self.journal.with_name(f".{self.journal.name}.{os.getpid()}.tmp")
        self._journal = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        self._write_down(self.lines.values())
        beside.rename(self.journal)

    def _write_down(self, lines: Iterable[Line]) -> None:
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        while text:
            text = text[os.write(self._journal, text) :]

    def write(self, row: int, buffers: Sequence[Data]) -> Line:
        """Put a row, one buffer a tensor, in its place; the line to be handed to `count`, until when it is not there."""
        for tensor, buffer in enumerate(buffers):
            write_at(self._part, buffer, self.layout.place(tensor, row))
        return {ROW: row, ROW_SUMS: [self.layout.checksum(buffer) for buffer in buffers]}

    def read_back(self, line: Line) -> list[bytearray]:
        """A written row. Raises OSError when it is not what was written."""
        buffers = [bytearray(size) for size in self.layout.sizes]
        wrong = read_row(self._part, self.layout, line, [memoryview(buffer) for buffer in buffers])
        if wrong is not None:
            raise OSError(f"{self.part}: row {line[ROW]}: {wrong} is not read as it was written")
        return buffers

    def count(self, line: Line) -> None:
        """Say of a row that was written, or is left out, that it is there."""
        self.check()
        self._write_down([line])
        self.lines[line[ROW]] = line

    def finish(self) -> None:
        """Give the chunk its name, all rows being there."""
        assert not self.missing, f"{self.part}: rows are missing"
        os.fsync(self._part)
        self.close()
        self.check()
        self.part.rename(self.whole)
        fsync_path(self.whole.parent)
        write_text(self.sums, self._last_file())
        self.journal.unlink()

    def _last_file(self) -> str:
        lines = ",\n".join(json.dumps(self.lines[row]) for row in self.layout.rows)
        return f'{{"declaration": "{self.layout.declaration.hash}", "rows": [\n{lines}\n]}}\n'

    def close(self) -> None:
        """Let go of the files of a chunk in work."""
        for file in (self._part, self._journal):
            if file >= 0:
                os.close(file)
        self._part = self._journal = -1
