"""Stored states stay as long as a stage needs them, and no longer."""

from pathlib import Path

import pytest

from longspec.states.holds import COPY, hold, needed_by, put_back, release, set_aside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """States that two stages are to be trained on."""
    folder = tmp_path / "demo/rows/hidden"
    for reader in ("one_ttt_base", "two_ttt_base"):
        hold(folder, reader)
    (folder / "0-of-1").mkdir()
    (folder / "0-of-1/rows-000000-000063.safetensors").write_bytes(b"states")
    return folder


def test_the_last_stage_removes_them(folder: Path) -> None:
    note = release(folder, "one_ttt_base")
    assert (folder / "0-of-1/rows-000000-000063.safetensors").exists()
    assert note == {"states": str(folder), "still_needed_by": ["two_ttt_base"]}
    note = release(folder, "two_ttt_base")
    assert list(folder.parent.iterdir()) == []
    assert note["still_needed_by"] == []


def test_a_stage_that_is_released_twice_removes_nothing_of_others(folder: Path) -> None:
    """Its first try may have been killed before its note was there."""
    for _ in range(2):
        release(folder, "one_ttt_base")
    assert needed_by(folder) == ["two_ttt_base"]
    assert (folder / "0-of-1").is_dir()


def test_states_that_are_gone_are_released_too(tmp_path: Path) -> None:
    assert release(tmp_path / "demo/rows/hidden", "one_ttt_base")["still_needed_by"] == []


def test_what_a_killed_removal_has_left_goes_with_the_next(folder: Path) -> None:
    folder.rename(folder.with_name("hidden.removed-4711"))
    hold(folder, "one_ttt_base")
    release(folder, "one_ttt_base")
    assert list(folder.parent.iterdir()) == []


def test_what_was_set_aside_is_put_back_unless_it_was_made_anew(tmp_path: Path) -> None:
    states = tmp_path / COPY
    states.write_text("old")
    for _ in range(2):
        set_aside(tmp_path)
        assert not states.exists()
    put_back(tmp_path)
    assert states.read_text() == "old"
    set_aside(tmp_path)
    states.write_text("new")
    for _ in range(2):
        put_back(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]
