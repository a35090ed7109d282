"""JSON Lines: our own files whole, and one foreign line at a time for whoever sorts the broken ones out."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jsonlines

from longspec.atomic_files import new_file


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file. Raises ValueError with file and line for one that is not an object."""
    with jsonlines.open(path) as reader:
        try:
            yield from reader.iter(type=dict)
        except jsonlines.InvalidLineError as error:
            raise ValueError(f"{path}: line {error.lineno}: {error.args[0]}; each line must be one JSON object") from error


def write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write a whole JSON Lines file at once; returns the number of rows."""
    count = 0
    with new_file(path) as beside, jsonlines.open(beside, mode="w") as writer:
        for row in rows:
            writer.write(row)
            count += 1
    return count


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its pairs; Python's own way keeps the last of two equal keys and drops the first in silence."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"names the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is no JSON number")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def decode(text: str) -> Any:
    """The value that JSON text holds, by the letter of the standard. Raises ValueError that says what is wrong with it."""
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise ValueError("is nested too deep to be read") from None


# Not json.dumps: with a keyword it builds an encoder for each record. What is not ASCII is escaped, so that a lone
# surrogate in a field that nobody reads does not end the job.
encode = json.JSONEncoder(allow_nan=False).encode


def parse(line: bytes) -> dict[str, Any]:
    """The object that a line of anything holds, as of decode. Raises ValueError that says what is wrong with it."""
    try:
        found = decode(line.decode())
    except ValueError as error:
        raise ValueError(_reason(error, line)) from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, is {'null' if found is None else type(found).__name__}")
    return found


def _reason(error: ValueError, line: bytes) -> str:
    """Why a line is no JSON, without the parser's line number, which is always 1: it is given one line at a time."""
    if b"\0" in line:
        return f"holds {line.count(0)} NUL bytes"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: byte {line[error.start]:#04x} at byte {error.start + 1}"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
    return str(error).partition(";")[0]
