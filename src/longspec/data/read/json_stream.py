"""Where one record ends and the next begins, in lines and in JSON arrays, whatever a file's or a record's size.

A file is cut into pieces of bounded size; pieces are gathered into elements (a line, a value of a JSON array) up to a limit.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

PIECE = 1 << 20  # bytes read at once
BOM = b"\xef\xbb\xbf"
# A piece of an element: bytes, and whether the element ends with them.
Piece = tuple[bytes, bool]

# Up to the next bracket (directly inside the array: or comma) that is in no string, or to a string that does not end here.
# The group around whole strings is not possessive: up to Python 3.11.4 such a one keeps the beginning of what failed inside it.
# It is bounded, since it remembers each string; the string after so many is passed by itself.
_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_INSIDE_STRING = re.compile(_STRING, re.DOTALL)
_BETWEEN_VALUES = re.compile(rb'[^"{}\[\],]*+(?:"' + _STRING + rb'"[^"{}\[\],]*+){0,1000}', re.DOTALL)
_INSIDE_VALUE = re.compile(rb'[^"{}\[\]]*+(?:"' + _STRING + rb'"[^"{}\[\]]*+){0,1000}', re.DOTALL)
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")


@dataclass(frozen=True)
class Element:
    """The bytes of one element, or of an overlong one its beginning and, read only when asked for, the rest."""

    content: bytes
    rest: Iterator[bytes] | None = None


def gather(pieces: Iterator[Piece], limit: int) -> Iterator[Element]:
    """The elements; one of more than `limit` bytes is never held as a whole."""
    for piece, ends in pieces:
        parts, size = [piece], len(piece)
        while not ends and size <= limit:
            piece, ends = next(pieces)
            parts.append(piece)
            size += len(piece)
        if size <= limit:
            yield Element(b"".join(parts))
            continue
        rest = _until_end(pieces) if not ends else iter(())
        yield Element(b"".join(parts), rest)
        for _ in rest:  # what nobody asked for
            pass


def _until_end(pieces: Iterator[Piece]) -> Iterator[bytes]:
    for piece, ends in pieces:
        yield piece
        if ends:
            return


def line_pieces(handle: BinaryIO) -> Iterator[Piece]:
    """The lines of a file with their ends."""
    ends = True
    while piece := handle.readline(PIECE):
        ends = piece.endswith(b"\n")
        yield piece, ends
    if not ends:
        yield b"", True


class JsonArray:
    """The values of a JSON array, found by their brackets without being parsed.

    A broken value ends where its brackets do, so that its neighbours are still found. Raises ValueError when the text
    ends inside a value, or holds something behind the array: nobody knows how many records are missing then.
    """

    def __init__(self, handle: BinaryIO, name: str) -> None:
        self._handle, self._name = handle, name
        self._buffer, self._at = b"", 0
        self._read = self._number = 0  # bytes before the buffer, values so far

    def _more(self) -> bool:
        """Go on to the next stretch of the file; False at its end."""
        self._read += len(self._buffer)
        self._buffer, self._at = self._handle.read(PIECE), 0
        return bool(self._buffer)

    def _place(self) -> str:
        return f"{self._name}: record {self._number}, at byte {self._read + self._at}"

    def _skip_space(self) -> bytes:
        """The next byte that is no white space, b"" at the end of the file."""
        while True:
            found = _NOT_SPACE.search(self._buffer, self._at)
            if found:
                self._at = found.start()
                return found[0]
            if not self._more():
                return b""

    def pieces(self) -> Iterator[Piece]:
        """The values' bytes, without the commas between them."""
        self._skip_space()
        self._at += 1
        ended = self._skip_space() == b"]"
        self._at += ended
        while not ended:
            self._number += 1
            self._skip_space()
            yield from self._value()
            ended = self._buffer[self._at : self._at + 1] == b"]"
            self._at += 1
        if self._skip_space():
            raise ValueError(f"{self._place()}: text after the end of the array; JSON Lines belong in a .jsonl file")

    def _value(self) -> Iterator[Piece]:
        """One value: up to the comma or bracket behind it."""
        start, depth, in_string = self._at, 0, False
        while True:
            pattern = _INSIDE_STRING if in_string else _BETWEEN_VALUES if depth == 0 else _INSIDE_VALUE
            found = pattern.match(self._buffer, self._at)
            assert found is not None, "it matches the empty string, too"
            self._at = found.end()
            mark = self._buffer[self._at : self._at + 1]
            if mark in (b"", b"\\"):  # the stretch ends here, perhaps between a backslash and what it escapes
                yield self._buffer[start:], False
                if not self._more():
                    raise ValueError(f"{self._place()}: the file ends inside this record; it was cut off, get it again")
                start, self._at = 0, len(mark)
                continue
            self._at += 1
            if mark == b'"':
                in_string = not in_string
            elif mark in b"{[":
                depth += 1
            elif depth == 0 and mark == b"}":  # opened nowhere: part of a broken value
                continue
            elif depth == 0:  # the comma or bracket behind it
                self._at -= 1
                yield self._buffer[start : self._at], True
                return
            else:
                depth -= 1
