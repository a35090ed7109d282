"""Errors by what they carry: the place at fault, which each begins with, and facts: values, paths, commands to type.

All wordings stand in tests/golden/wordings.txt, where a change of words shows as a difference of one line:

    python -m tests.refusals        writes them anew
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDINGS = ROOT / "tests/golden/wordings.txt"
# Three plain words in a row, which are a sentence; commands, paths and keys have other characters between.
_SENTENCE = re.compile(r"(?<![\w./:{-])[a-z]{2,} [a-z]{2,} [a-z]{2,}(?![\w./:={-])")

Caught = pytest.ExceptionInfo[BaseException]
Fact = str | int | Path | re.Pattern[str]


@contextmanager
def refused(place: str | Path, *facts: Fact, kind: type[BaseException] = ValueError) -> Iterator[Caught]:
    """The block raises an error of this place, such as a file, a key or an option, whose text has each of the facts."""
    with pytest.raises(kind) as caught:
        yield caught
    check(str(caught.value).removeprefix("error: "), place, *facts)
    del caught  # else it and this frame, which is in its traceback, keep each other alive, with the files that the block opened


def check(text: str, place: str | Path, *facts: Fact) -> None:
    """Check an error's text: it begins with the place, which ends there, and has each of the facts."""
    here = f"{Path.cwd()}/"  # what lies below it is shown from here
    text = text.replace(here, "")
    assert re.match(rf"{re.escape(str(place).replace(here, ''))}(?!\w)", text), text
    for fact in facts:
        found = fact.search(text) if isinstance(fact, re.Pattern) else str(fact).replace(here, "") in text
        assert found, f"{fact!r} is not in: {text}"
        assert not _SENTENCE.search(str(fact)), f"{fact!r} is a wording; name a value, a path, a key or a command of it"


def _template(node: ast.expr) -> str:
    """The text that an expression makes: its own words, and in braces what is put in."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(_template, node.values))
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
    return f"{{{ast.unparse(node)}}}"


def wordings() -> str:
    """All errors that src raises, a line each: the module, the kind and the template."""
    lines = []
    for path in sorted((ROOT / "src/longspec").rglob("*.py")):
        raised = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        for node in sorted(raised, key=lambda node: node.lineno):
            if isinstance(node.exc, ast.Call) and node.exc.args:
                told = ": ".join([ast.unparse(node.exc.func), *map(_template, node.exc.args)])
                lines.append(f"{path.relative_to(ROOT / 'src')}: {' '.join(told.split())}\n")
    return "".join(lines).replace('"', "'")  # which of them stand in an expression depends on Python's version


if __name__ == "__main__":
    WORDINGS.write_text(wordings())
