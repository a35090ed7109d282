"""The manifests of a target and of its tokenizer: where the folder lies and what must be in it."""

from pathlib import Path
from typing import Any

from longspec.atomic_files import describe_files, write_json


def folder_text(folder: Path) -> str:
    """A folder as manifests write it: relative to the working directory when inside it, else absolute."""
    whole, here = folder.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def write_manifest(path: Path, folder: Path, source: str, names: list[str], **more: Any) -> None:
    """Write the manifest of a folder of which `names` are the files that count, with their hashes."""
    write_json(path, {"path": folder_text(folder), "source": source, "files": describe_files(folder, names), **more})
