"""Whole or not at all."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from longspec.artefact import check_files, describe_files, new_file, new_folder, read_json, write_json


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
    assert (tmp_path / "folder/x").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "folder"]


def test_files_are_held_against_their_manifest(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    files = describe_files(tmp_path, ["x"])
    check_files(tmp_path, files)
    (tmp_path / "x").write_bytes(b"1235")
    check_files(tmp_path, files, hashes=False)
    with pytest.raises(ValueError, match="SHA-256 differs"):
        check_files(tmp_path, files)
    (tmp_path / "x").write_bytes(b"123")
    with pytest.raises(ValueError, match="3 bytes, its manifest says 4"):
        check_files(tmp_path, files, hashes=False)
    (tmp_path / "x").unlink()
    with pytest.raises(ValueError, match="missing"):
        check_files(tmp_path, files)


def test_json_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.json: no such file"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{\n1")
    with pytest.raises(ValueError, match=r"a\.json: line 2: not valid JSON"):
        read_json(tmp_path / "a.json")
