"""Read the records that become a task's prompts from its files. No torch: the plan reads the first of them."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longspec.config.names import readable_name
from longspec.data.hub import MANIFEST, read_fetched
from longspec.data.read import source_files
from longspec.measure.tasks import Benchmark

MAX_LINE_BYTES = 32_000_000


def manifest_of(task: Benchmark) -> Path | None:
    """Return where the manifest of a task's files from the hub is; None for files of this machine."""
    if task.revision is None:
        return None
    return Path(MANIFEST.format(dataset=readable_name(str(task.source), task.revision)))


def files_of(name: str, task: Benchmark) -> list[Path]:
    """Return a task's files. Raises ValueError, with its key, if one is missing or has changed since it was fetched."""
    manifest = manifest_of(task)
    if manifest is None or task.revision is None:
        return source_files.files_of(task.source)
    return read_fetched(manifest, f"evaluation.tasks.{name}", str(task.source), task.revision)[0]


def read_records(path: Path, member: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (file and line) and the fields of every record; from a zip archive those of its file `member`.

    Raises ValueError for a line without a record, and for an archive that is damaged or lacks the file.
    """
    with TemporaryDirectory() as folder:
        plain = path
        if member:
            try:
                with zipfile.ZipFile(path) as archive:
                    plain = Path(archive.extract(member, folder))
            except KeyError:
                raise ValueError(f"{path}: has no file {member}; name one that it has as the task's `member`") from None
            except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
                raise ValueError(f"{path}: {member}: {error}; the archive is damaged: get it again") from error
        for item in source_files.read(plain, MAX_LINE_BYTES):
            place = f"{f'{path}/{member}' if member else item.file}: line {item.line}"
            if item.record is None:
                raise ValueError(f"{place}: {item.error}; correct or remove the line")
            yield place, item.record
