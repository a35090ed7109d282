"""Files that a user names: that Snakemake can work with their paths, and that prompts have the fields that are asked for."""

from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path

from longspec.data.align.align_base import found
from longspec.data.align.fields import units_of
from longspec.evaluate.prompt_files import read_records
from longspec.evaluate.tasks import Benchmark


def check_paths(paths: Iterable[Path]) -> None:
    """Raise ValueError for a path that would not come through the workflow as it is."""
    for path in map(str, paths):
        if "{" in path or "}" in path:
            raise ValueError(f"{path}: has braces, which the workflow takes for a wildcard; rename the file")
        if not path.isprintable():
            raise ValueError(f"{path!r}: has characters that cannot be shown; rename the file")


def check_fields(key: str, task: Benchmark, paths: Iterable[Path]) -> None:
    """Raise ValueError when the first record of a file has not the fields of the task's template; no other record is read."""
    for path in paths:
        for (place, record), name in product(islice(read_records(path, task.member), 1), units_of(task.template)):
            if found(record, name) is None:
                raise ValueError(
                    f"{key}.template: asks for {{{name}}}, which is missing or null in {place}; its fields: {', '.join(record)}"
                )
