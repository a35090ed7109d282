"""What `make lint` notes: rooms and files above their limits, and none at them."""

from pathlib import Path

from tests.sizes import notes


def test_rooms_and_files_above_their_limits_are_noted(tmp_path: Path) -> None:
    for room, files in (("full", 20), ("crowded", 21)):
        (tmp_path / room / "inner").mkdir(parents=True)
        (tmp_path / room / "inner/one.py").touch()  # counted in its own folder
        (tmp_path / room / "page.j2").touch()
        for number in range(files):
            (tmp_path / room / f"{number}.py").touch()
    (tmp_path / "full/0.py").write_text("\n" * 350)
    (tmp_path / "full/1.py").write_text("\n" * 351)
    assert notes(tmp_path) == [
        f"note: {tmp_path}/crowded: 21 Python files, more than 20",
        f"note: {tmp_path}/full/1.py: 351 lines, more than 350",
    ]
