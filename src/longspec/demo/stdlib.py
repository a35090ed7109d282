"""The sources of Python's own standard library: real text that every machine has.

Modules as they are, and their public classes and functions, read as syntax trees: nothing is imported or run.
"""

import ast
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEFT_OUT_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "ensurepip", "pydoc_data", "encodings"}
LEFT_OUT_FOLDERS |= {"test", "tests", "idlelib", "lib2to3", "turtledemo"}
# Tables without a generator's notice in their first lines.
GENERATED_FILES = frozenset({"html/entities.py"})
GENERATED_NOTICE = re.compile(r"\b(auto-?|automatically )?generated (by|and used by|from)\b|automatically generated", re.I)
NOTICE_CHARACTERS = 200
_UNUSABLE = re.compile("[\0\ud800-\udfff]")  # characters that records may not have; bytes that are no UTF-8 are read as such
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_modules(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the relative path and text of every module, sorted; None for a file that is empty, generated or not UTF-8."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file())
    for name in names:
        if LEFT_OUT_FOLDERS.intersection(name.split("/")):
            continue
        text = (folder / name).read_text(encoding="utf-8", errors="surrogateescape")
        # A table that a program wrote is huge, and no text that a person reads.
        is_generated = name in GENERATED_FILES or GENERATED_NOTICE.search(text[:NOTICE_CHARACTERS])
        yield name, text if text.strip() and not _UNUSABLE.search(text) and not is_generated else None


def generate(min_characters: int = 0, as_source: str | None = None) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield key and record of every module; None for a module that is unusable or shorter than `min_characters`."""
    source = {} if as_source is None else {"source": as_source}
    for name, text in read_modules(Path(sysconfig.get_path("stdlib"))):
        kept = text is not None and len(text) >= min_characters
        yield name, {**source, "text": text, "path": name} if kept else None


@dataclass(frozen=True)
class Unit:
    """Hold a module, class or function. path: its file's, relative to the library; documentation: its docstring, "" for none;
    code: its whole source, a function's without its docstring.
    """

    path: str
    kind: str  # module | class | function
    name: str  # as it is imported: textwrap.dedent
    documentation: str
    code: str

    @property
    def sentence(self) -> str:
        """Return the documentation's first sentence, without its full stop; "" where there is none."""
        first = " ".join(self.documentation.split("\n\n")[0].split())
        end = first.find(". ")
        return (first if end < 0 else first[:end]).removesuffix(".")


def module_name(path: str) -> str:
    """Return the name under which a file is imported: email/__init__.py is email."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """Yield the public classes and functions of a body, with their names; a class's methods follow it."""
    for node in body:
        if isinstance(node, Definition) and not _is_private(node.name):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, name)


def units_of(path: str, text: str) -> Iterator[Unit]:
    """Yield the public units of one module: itself, then its classes and functions in their order."""
    name, tree, lines = module_name(path), ast.parse(text), text.splitlines()
    yield Unit(path, "module", name, _documentation(tree), text.strip("\n"))
    for full_name, node in _definitions(tree.body, name):
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        yield Unit(path, kind, full_name, _documentation(node), _code(node, lines))


def _code(node: Definition, lines: list[str]) -> str:
    """Return a definition's source without indentation, and a function's without its docstring, which says what it does."""
    kept = lines[node.lineno - 1 : node.end_lineno]
    first = node.body[0]
    alone = first.lineno > node.lineno and len(node.body) > 1 and node.body[1].lineno > (first.end_lineno or 0)
    if not isinstance(node, ast.ClassDef) and ast.get_docstring(node) is not None and alone:
        kept = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(kept))


def _documentation(node: ast.Module | Definition) -> str:
    """Return a docstring without indentation; "" if it holds characters that records may not have."""
    text = ast.get_docstring(node, clean=False) or ""
    return "" if _UNUSABLE.search(text) else inspect.cleandoc(text).strip()


def read_units(folder: Path | None = None) -> Iterator[Unit]:
    """Yield all public units of a library in the order of their files' names; folder: None for this Python's own library."""
    for path, text in read_modules(folder or Path(sysconfig.get_path("stdlib"))):
        if text is not None and not _is_private(module_name(path)):
            yield from units_of(path, text)
