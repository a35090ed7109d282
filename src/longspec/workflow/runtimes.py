"""How a stage is run, written down beside it: no input of its job, since it re-trains nothing."""

from pathlib import Path

from longspec.atomic_files import write_text


def freeze_runtime(stage: str, text: str) -> None:
    """Write the runtime.yaml of a stage's folder before its job starts, where it is not there or reads otherwise."""
    path = Path(stage) / "runtime.yaml"
    if not path.is_file() or path.read_text() != text:
        write_text(path, text)
