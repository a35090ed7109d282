"""How a stage is run, written down beside it: no input of its job, since it re-trains nothing."""

from pathlib import Path

from longspec.atomic_files import write_text


def freeze_runtime(folder: str, text: str, name: str = "runtime.yaml") -> None:
    """Write this file of a job's folder before the job starts, where it is not there or reads otherwise."""
    path = Path(folder) / name
    if not path.is_file() or path.read_text() != text:
        write_text(path, text)
