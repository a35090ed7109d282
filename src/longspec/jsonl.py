"""JSON Lines: our own files as a whole, and foreign files line by line, so that a caller can sort out broken lines."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import jsonlines

from longspec.atomic_files import new_file


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file. Raises ValueError with file and line for one that is not an object."""
    with jsonlines.open(path, loads=json.loads) as reader:  # orjson, where it is installed, refuses lone surrogates
        try:
            yield from reader.iter(type=dict)
        except jsonlines.InvalidLineError as error:
            raise ValueError(f"{path}: line {error.lineno}: {error.args[0]}; each line must be one JSON object") from error


def write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write a whole JSON Lines file at once; return the number of rows."""
    count = 0
    with new_file(path) as beside, jsonlines.open(beside, mode="w") as writer:
        for row in rows:
            writer.write(row)
            count += 1
    return count


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its pairs. Raises ValueError for a repeated key, of which Python silently keeps the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        [(name, _), *_] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"names the key {name!r} twice")
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is no JSON number")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"holds {text}, which is beyond any float")
    return value


# Python 3.11 gives up at 1,000 levels, 3.13 at 10,000; all versions must reject the same records.
LEVELS, TOO_DEEP = 500, "is nested too deep to be read"
_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_number)


def decode(text: str) -> Any:
    """Return the value of JSON text, by the letter of the standard. Raises ValueError that says what is wrong."""
    try:
        value = _decoder.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > LEVELS and _levels(value) > LEVELS:
        raise ValueError(TOO_DEEP)
    return value


def _levels(value: Any) -> int:
    """Return how deep lists and objects are nested."""
    level, count = [value], 0
    while parts := [each for each in level if isinstance(each, dict | list)]:
        level, count = [each for part in parts for each in (part.values() if isinstance(part, dict) else part)], count + 1
    return count


# Not json.dumps, which builds an encoder for each record when it gets a keyword. Non-ASCII characters are escaped, so that a
# lone surrogate in a field that nobody reads does not end the job.
encode = json.JSONEncoder(allow_nan=False).encode


def parse(line: bytes) -> dict[str, Any]:
    """Return the object in a line, read as decode does. Raises ValueError that says what is wrong with it."""
    try:
        found = decode(line.decode())
    except json.JSONDecodeError as error:  # its own line number is always 1
        raise ValueError(f"is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, is {'null' if found is None else type(found).__name__}")
    return found


def whole_lines(path: Path, keys: Collection[str] | None = None, most: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a growing file of ours, [] without a file. A last line that a kill tore is left out.

    keys: those that are kept, since ids of long answers need much memory; None: all. most: how many lines are read. Raises
    ValueError, with the line, for any other line that holds no object.
    """
    rows = []
    with path.open("rb") if path.exists() else nullcontext(()) as lines:
        for number, line in enumerate(islice(lines, most), start=1):
            try:
                row = parse(line) if line.endswith(b"\n") and line.strip() else {}
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: damaged ({error}); remove that line") from error
            rows += [row if keys is None else {key: row[key] for key in keys if key in row}] if row else []
    return rows
