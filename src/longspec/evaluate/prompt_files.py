"""The records that a task's prompts are made of, as its files hold them. No torch: the plan reads the first of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from longspec.data.read import source_files
from longspec.data.read.items import Note
from longspec.distributed import log
from longspec.shown import one_line

MAX_LINE_BYTES = 32_000_000


def read_records(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of the files with its place. Raises ValueError for a line that holds none."""
    for path in paths:
        for item in source_files.read(path, MAX_LINE_BYTES):
            if isinstance(item, Note):
                log(one_line(f"{item.file}: {item.count} x {item.reason} (first: line {item.line})"))
                continue
            place = f"{item.file}: line {item.line}"
            if item.record is None:
                raise ValueError(f"{place}: {item.error}; correct or remove the line")
            yield place, item.record


def first_record(path: Path) -> tuple[str, dict[str, Any]] | None:
    """The first record of a file with its place; None where there is none. Raises ValueError for a line that holds none."""
    return next(read_records([path]), None)
