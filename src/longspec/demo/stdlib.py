"""The sources of Python's own standard library: real text that every machine has."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEFT_OUT_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "ensurepip", "pydoc_data", "encodings"}
LEFT_OUT_FOLDERS |= {"test", "tests", "idlelib", "lib2to3", "turtledemo"}
# Tables without a generator's notice in their first lines.
GENERATED_FILES = frozenset({"html/entities.py"})
GENERATED_NOTICE = re.compile(r"\b(auto-?|automatically )?generated (by|and used by|from)\b|automatically generated", re.I)
NOTICE_CHARACTERS = 200
# A whole library has more than 500 modules; fewer than this is a trimmed one.
FEWEST_MODULES = 200


def _is_generated(name: str, text: str) -> bool:
    """Whether a file is a table that a program wrote: no text a person reads, and huge when it is one."""
    return name in GENERATED_FILES or GENERATED_NOTICE.search(text[:NOTICE_CHARACTERS]) is not None


def read_modules(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Relative path and text of every module, sorted; None for a file that is empty, generated or not UTF-8."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file())
    for name in names:
        if LEFT_OUT_FOLDERS.intersection(name.split("/")):
            continue
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield name, None
            continue
        usable = text.strip() and "\0" not in text and not _is_generated(name, text)
        yield name, text if usable else None


def generate(
    min_characters: int = 0, as_source: str | None = None, folder: Path | None = None
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Key and record of every module; None in place of one that is unusable or shorter than `min_characters`.

    Raises ValueError when the library was trimmed by the system's packager.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    source = {} if as_source is None else {"source": as_source}
    modules = 0
    for name, text in read_modules(folder):
        modules += text is not None
        kept = text is not None and len(text) >= min_characters
        yield name, {**source, "text": text, "path": name} if kept else None
    if modules < FEWEST_MODULES:
        raise ValueError(
            f"{folder}: only {modules} modules of Python's standard library, at least {FEWEST_MODULES} expected; "
            "this Python was trimmed: install the full one (Debian: libpython3-stdlib, or a build from python.org)"
        )
