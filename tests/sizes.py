"""Notes of `make lint` on what has grown too large to be read in one go; none is an error: python -m tests.sizes"""

from collections import Counter
from pathlib import Path

FILES, LINES = 20, 350  # at most: Python files of a room, lines of a file


def notes(source: Path) -> list[str]:
    """A line for each folder that holds too many Python files, and for each of these that is too long."""
    paths = sorted(source.rglob("*.py"))
    rooms = Counter(path.parent for path in paths)
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    found = [f"note: {room}: {count} Python files, more than {FILES}" for room, count in rooms.items() if count > FILES]
    return found + [f"note: {path}: {count} lines, more than {LINES}" for path, count in lines.items() if count > LINES]


if __name__ == "__main__":
    print("".join(f"{note}\n" for note in notes(Path("src"))), end="")
