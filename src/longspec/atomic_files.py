"""Files and folders that appear whole or not at all, and the manifests that prove it.

Everything is written beside its final name, flushed to the disk and renamed; a name that exists is complete.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import join
from threading import current_thread, get_native_id, main_thread
from typing import Any

from longspec.shown import FULL


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_json(content: Any) -> str:
    """Return the SHA-256 of JSON, in hexadecimal; the order of keys is no matter."""
    return sha256_text(json.dumps(content, sort_keys=True))


def fsync_path(path: Path) -> None:
    """Flush a file or a folder entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_alive(process: int) -> bool:
    """Tell whether a process of this machine runs, also another user's, which /proc may hide."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link; what a link names stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_strays(*finals: Path) -> None:
    """Remove temporary files that killed jobs left beside these final names. One job at a time may make such a name."""
    for path in [path for folder in {final.parent for final in finals} for path in folder.glob(".*.tmp")]:
        found = re.fullmatch(r"\.(.+)\.(\d+)(-old|-\d+)?\.tmp", path.name)
        if found and path.with_name(found[1]) in finals and not is_alive(int(found[2])):
            remove(path)


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """Yield a path beside `final` to write to; it is renamed to `final` when the block ends, and removed when it fails."""
    final.parent.mkdir(parents=True, exist_ok=True)
    # Two threads of a process may write one name.
    thread = "" if current_thread() is main_thread() else f"-{get_native_id()}"
    beside = final.with_name(f".{final.name}.{os.getpid()}{thread}.tmp")
    try:
        yield beside
        fsync_path(beside)
        beside.replace(final)
        fsync_path(final.parent)
    except OSError as error:
        if error.errno in FULL:  # a failed write names no file
            error.filename = error.filename or str(final)
        raise
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a folder beside `final` to fill. It replaces `final` when the block ends, and is removed when the block fails.

    If the process is killed in between, `final` is the old folder, the new one, or missing.
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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ValueError, with the file's name, if it is missing or holds none."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; make it first, or correct the path")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also not UTF-8, a number of thousands of digits, endless nesting
        line = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}: {line}not valid JSON ({error}); make the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object ({{...}}), holds a {type(content).__name__}; make the file again")
    return content


def files_below(folder: Path) -> list[str]:
    """Return the sorted names of all files in a folder and its subfolders, relative to the folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def path_text(path: Path) -> str:
    """Return a path as manifests write it: relative if it lies in the working directory, else absolute."""
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def describe_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Describe each named file of a folder by size and SHA-256, for a manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in sorted(names)}


def seen_file(manifest: Path) -> Path:
    """Return the hidden file beside a manifest that keeps size, time and hash of its files from their last good check."""
    return manifest.with_name(f".{manifest.name}.seen")


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _seen(manifest: Path) -> dict[str, list[Any]]:
    """Read what _note_seen wrote: size, time and hash by file name; {} if it is torn or missing."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(seen_file(manifest).read_text(encoding="utf-8")))
    return {}


def _note_seen(manifest: Path, found: dict[str, list[Any]]) -> None:
    """Note files with size, time and hash. Where this user may not write, the files are hashed again the next time."""
    with suppress(OSError):
        write_json(seen_file(manifest), _seen(manifest) | found)


def write_manifest(manifest: Path, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write a manifest whose `files` describe a folder as it is now; they are hashed again only once they change."""
    write_json(manifest, content)
    _note_seen(manifest, {name: [*_stamp(folder / name), file["sha256"]] for name, file in content["files"].items()})
    return content


def check_files(folder: Path, files: dict[str, dict[str, Any]], manifest: Path | None = None, *, advice: str = "") -> None:
    """Check a folder against a manifest's `files`. Raises ValueError that names the first file that differs.

    manifest: the file that lists them, if its job makes them again after it is removed. The error says so, unless `advice` is
    given. With a manifest, a file that has size and time of an earlier good check is not hashed; any other time, older or
    newer, makes it hash again.
    """
    seen = _seen(manifest) if manifest else {}
    advice = advice or (f"have it made again after: {join(['rm', str(manifest)])}" if manifest else "make it again")
    found: dict[str, list[Any]] = {}
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: missing, though its manifest lists it; {advice}")
        stamp, wanted = _stamp(path), expected.get("sha256")
        if stamp[0] != expected["bytes"]:
            raise ValueError(f"{path}: {stamp[0]} bytes, its manifest says {expected['bytes']}; torn or edited; {advice}")
        if wanted is None or seen.get(name) == [*stamp, wanted]:
            continue
        found[name] = [*stamp, sha256_file(path)]
        if found[name][2] != wanted:
            raise ValueError(f"{path}: its SHA-256 differs from its manifest's; corrupt or edited; {advice}")
    if manifest and found:
        _note_seen(manifest, found)


def checked_manifest(manifest: Path) -> dict[str, Any]:
    """Read a manifest and check its files, which lie in its `path` or beside it. Raises ValueError as check_files does."""
    content = read_json(manifest)
    check_files(Path(content.get("path", manifest.parent)), content.get("files", {}), manifest)
    return content


def checked_file(manifest: Path, name: str) -> Path:
    """Return the file `name` beside a manifest. Raises ValueError as check_files does if it is listed and has changed."""
    listed = read_json(manifest).get("files", {})
    check_files(manifest.parent, {name: listed[name]} if name in listed else {}, manifest)
    return manifest.parent / name


def named_folder(manifest: Path) -> str:
    """Return the folder that a manifest names as its `path`. Raises ValueError for JSON without `path` or `files`."""
    content = read_json(manifest)
    if missing := sorted({"path", "files"} - content.keys()):
        raise ValueError(f"{manifest}: {missing[0]}: missing, so it names no folder; give models/<name>/target_manifest.json")
    return str(content["path"])


def checked_folder(manifest: Path) -> str:
    """Return the folder that a manifest names, its files checked. Raises ValueError as named_folder and check_files do."""
    folder = named_folder(manifest)
    checked_manifest(manifest)
    return folder
