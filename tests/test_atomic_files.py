"""Whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from longspec import atomic_files
from longspec.atomic_files import (
    check_files,
    checked_file,
    checked_folder,
    describe_files,
    new_file,
    new_folder,
    read_json,
    remove_strays,
    sha256_file,
    write_json,
    write_manifest,
)
from tests.refusals import refused


def write_half(beside: AbstractContextManager[Path], inside: str) -> None:
    with beside as path:
        (path / inside).write_text("half")
        1 / 0  # noqa: B018


def test_a_failed_file_or_folder_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    with new_folder(tmp_path / "folder") as beside:
        (beside / "x").write_text("old")
    for kind, name, inside in ((new_file, "a.json", ""), (new_folder, "folder", "x")):
        with pytest.raises(ZeroDivisionError):
            write_half(kind(tmp_path / name), inside)
    assert read_json(tmp_path / "a.json") == {"old": 1}
    with pytest.raises(OSError, match="folder/no space") as caught, new_file(tmp_path / "folder/no space"):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    assert caught.value.errno == errno.ENOSPC, "a full disk is told with the file that found it full"
    assert (tmp_path / "folder/x").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "folder"]


def test_what_a_killed_process_left_beside_a_name_is_removed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    left = [tmp_path / f".a.{pid}{end}.tmp" for pid in (int(ended.stdout), os.getpid(), 1) for end in ("", "-old", "-4711")]
    for path in left:
        path.touch()
    remove_strays(tmp_path / "a")
    assert [path.exists() for path in left] == 3 * [False] + 6 * [True]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from longspec import atomic_files

def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)

with atomic_files.new_folder(Path(sys.argv[1])) as beside:
    for name in "xyz":
        (beside / name).write_text("new")
    if sys.argv[2] == "renaming":
        atomic_files.Path.rename = kill
    else:
        atomic_files.shutil.rmtree = kill
"""


@pytest.mark.parametrize(("moment", "found"), [("renaming", "old"), ("removing", "new")])
def test_a_kill_while_a_folder_is_replaced_leaves_a_whole_one(tmp_path: Path, moment: str, found: str) -> None:
    """And the next one that is made takes away what was left beside it."""
    final = tmp_path / "folder"
    with new_folder(final) as beside:
        for name in "xyz":
            (beside / name).write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(final), moment])
    assert killed.returncode == -signal.SIGKILL
    assert [(final / name).read_text() for name in "xyz"] == [found] * 3
    assert len(list(tmp_path.iterdir())) == 2
    with new_folder(final) as beside:
        (beside / "x").write_text("newest")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "x"]


@pytest.mark.parametrize("time", [(1, 1), (2**32, 2**32)])
def test_a_file_of_another_time_is_hashed_older_or_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: tuple[int, int]
) -> None:
    """As `cp -p` and an overwriting in place leave it; of the same time and size nothing is read."""
    (tmp_path / "x").write_bytes(b"1234")
    manifest = tmp_path / "manifest.json"
    write_manifest(manifest, tmp_path, {"path": str(tmp_path), "files": describe_files(tmp_path, ["x"])})
    hashed: list[str] = []
    monkeypatch.setattr(atomic_files, "sha256_file", lambda path: hashed.append(path.name) or sha256_file(path))
    assert checked_folder(manifest) == str(tmp_path)
    assert hashed == []
    (tmp_path / "x").write_bytes(b"1235")
    os.utime(tmp_path / "x", time)
    for _ in range(2):
        with refused(tmp_path / "x", "SHA-256", f"rm {manifest}"):
            checked_folder(manifest)
    (tmp_path / "x").write_bytes(b"1234")
    hashed.clear()
    assert [checked_folder(manifest) for _ in range(3)] == [str(tmp_path)] * 3
    assert hashed == ["x"]  # once, for its new time
    assert checked_file(manifest, "x") == tmp_path / "x"
    (tmp_path / "x").write_bytes(b"123")
    with refused(f"{tmp_path}/x: 3 bytes", "says 4", f"rm {manifest}"):
        checked_file(manifest, "x")
    (tmp_path / "x").unlink()
    with refused(f"{tmp_path}/x: missing"):
        check_files(tmp_path, read_json(manifest)["files"])


def test_json_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with refused(path, "such file", "correct the path"):
        read_json(path)
    for content, line in ((b"{\n1", ": line 2"), (b"\xff", ""), (b"[" * 10**5, ""), (b"[" + b"1" * 5000 + b"]", "")):
        path.write_bytes(content)
        with refused(f"{path}{line}", "valid JSON"):
            read_json(path)
