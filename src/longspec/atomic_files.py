"""Files and folders that appear whole or not at all, and the manifests that prove it.

Everything is written beside its final name, flushed to the disk and renamed; a name that exists is complete.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import join
from threading import current_thread, get_native_id, main_thread
from typing import Any


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """The SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file or a folder entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link; what a link names stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_strays(*finals: Path) -> None:
    """Remove what killed jobs left beside final names that are about to be made; one job at a time makes a name."""
    for final in finals:
        pattern = re.compile(re.escape(f".{final.name}.") + r"(\d+)(-old|-\d+)?\.tmp")
        for path in final.parent.glob(".*.tmp"):
            found = pattern.fullmatch(path.name)
            if found and not _is_alive(int(found[1])):
                remove(path)


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A path beside `final` to write to; renamed to `final` when the block ends, removed when it fails."""
    final.parent.mkdir(parents=True, exist_ok=True)
    # Two threads may write one name: the training and its watchdog both write a job's state.
    thread = "" if current_thread() is main_thread() else f"-{get_native_id()}"
    beside = final.with_name(f".{final.name}.{os.getpid()}{thread}.tmp")
    try:
        yield beside
        fsync_path(beside)
        beside.replace(final)
        fsync_path(final.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder beside `final` to fill; it takes the place of `final` when the block ends, and vanishes when it fails.

    Killed in between, `final` is the old folder, the new one, or not there.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_strays(final)
    beside, replaced = (final.with_name(f".{final.name}.{os.getpid()}{end}.tmp") for end in ("", "-old"))
    for leftover in (beside, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        for path in sorted(beside.rglob("*")):
            fsync_path(path)
        fsync_path(beside)
        if final.exists():
            final.rename(replaced)
        beside.rename(final)
        fsync_path(final.parent)
    finally:
        for leftover in (beside, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file at once."""
    with new_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, keys sorted, so that equal content gives equal bytes."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError with the file's name when it is missing or not JSON."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; make it first, or correct the path")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not valid JSON ({error.msg}); make the file again") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits, nesting without an end
        raise ValueError(f"{path}: not valid JSON ({error}); make the file again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ValueError as of read_json, and for another value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object ({{...}}), holds a {type(content).__name__}; make the file again")
    return content


def files_below(folder: Path) -> list[str]:
    """The names of all files of a folder and of the folders in it, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def path_text(path: Path) -> str:
    """A file or a folder as manifests write it: relative to the working directory when inside it, else absolute."""
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def describe_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each named file of a folder, for a manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in sorted(names)}


def check_files(
    folder: Path, files: dict[str, dict[str, Any]], manifest: Path | None = None, *, hashes: bool = True, newer: bool = False
) -> None:
    """Hold a folder against a manifest's files. Raises ValueError that names the first file that differs.

    manifest: of these files, where its job makes them again once it is gone, which the message then says. newer: where files
    are too large to be hashed each time, those alone are that were written after their manifest.
    """
    since = manifest.stat().st_mtime_ns if manifest and newer else None
    advice = f"have it made again after: {join(['rm', str(manifest)])}" if manifest else "make it again"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: missing, though its manifest lists it; {advice}")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(
                f"{path}: {path.stat().st_size} bytes, its manifest says {expected['bytes']}; torn or edited; {advice}"
            )
        if since is not None and path.stat().st_mtime_ns <= since:
            continue
        # A fetched target's weights are listed without a hash: 60 GB are not read twice.
        if hashes and "sha256" in expected and sha256_file(path) != expected["sha256"]:
            raise ValueError(f"{path}: its SHA-256 differs from its manifest's; corrupt or edited; {advice}")


def checked_folder(manifest: Path) -> str:
    """The folder that a manifest names as its `path`. Raises ValueError as check_files for what was changed in it since."""
    content = read_json(manifest)
    check_files(Path(content["path"]), content.get("files", {}), manifest, newer=True)
    return str(content["path"])
