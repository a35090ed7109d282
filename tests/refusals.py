"""Check errors by place and facts, not by their English.

An error of ours begins with its place: a file, a key, an option. Facts are values, paths, commands to type. The wordings of all
that the program says in three words or more stand in tests/golden/wordings.txt, where a change of words shows in one line:

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
# Four plain words in a row, which are a sentence; commands, paths and keys have other characters between.
_SENTENCE = re.compile(r"(?<![\w./:{-])[a-z']+(?: [a-z']+){3}(?![\w./:={-])")
_COMMAND = re.compile(r"`[^`]*`|(?:^|: )(longspec|make|pip|python|rm|snakemake) .*")

Caught = pytest.ExceptionInfo[BaseException]
Place = str | Path | re.Pattern[str]  # a pattern where it is at a key or below it
Fact = str | int | Path | re.Pattern[str]


@contextmanager
def refused(place: Place, *facts: Fact, kind: type[BaseException] = ValueError) -> Iterator[Caught]:
    """Check that the block raises an error of this place with all facts in its text; SystemExit's begins with "error: "."""
    with pytest.raises(kind) as caught:
        yield caught
    start = "error: " * (kind is SystemExit)
    text = str(caught.value)
    assert text.startswith(start), text
    check(text.removeprefix(start), place, *facts)
    del caught  # they keep each other alive otherwise, with the files that the block opened


def check(text: str, place: Place, *facts: Fact) -> None:
    """Check an error's text: it begins with the place, which ends there, and has each of the facts."""
    here = f"{Path.cwd()}/"  # what lies below it is shown from here
    text = text.replace(here, "")
    if not isinstance(place, re.Pattern):
        place = re.compile(rf"{re.escape(str(place).replace(here, ''))}(?![\w/[-]|\.\w)")
    assert place.match(text), f"{place.pattern} is not the start of: {text}"
    for fact in facts:
        words = fact.pattern if isinstance(fact, re.Pattern) else str(fact).replace(here, "")
        is_sentence = _SENTENCE.search(_COMMAND.sub("", words))
        assert not is_sentence, f"{words!r} is a wording; name a value, a path, a key or a command of it"
        if not isinstance(fact, re.Pattern):  # a number at its start or end is a whole one
            fact = re.compile(r"(?<!\d)" * words[:1].isdigit() + re.escape(words) + r"(?!\d)" * words[-1:].isdigit())
        assert fact.search(text), f"{words!r} is not in: {text}"


def _template(node: ast.expr) -> str:
    """Return the text of an expression, with braces around what is inserted."""
    match node:
        case ast.Constant():
            return str(node.value).replace("{", "{{").replace("}", "}}")
        case ast.JoinedStr():
            return "".join(map(_template, node.values))
        case ast.FormattedValue():
            form = "" if node.format_spec is None else f":{_template(node.format_spec)}"
            return f"{{{ast.unparse(node.value)}{'' if node.conversion < 0 else '!' + chr(node.conversion)}{form}}}"
    return f"{{{ast.unparse(node)}}}"


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of three words and more below a node, in their order, but for docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            told = " ".join(_template(child).split())
            if re.search("[a-z] .* [a-z]", told) and not isinstance(node, ast.Expr):
                yield told
        else:
            yield from _texts(child)


def wordings() -> str:
    """Return a line for each text of src that has three words and more: its module and its template."""
    lines = []
    for path in sorted((ROOT / "src/longspec").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines += [f"{path.relative_to(ROOT / 'src')}: {told}\n" for told in _texts(tree)]
    return "".join(lines).replace('"', "'")  # which of them stand in an expression depends on Python's version


if __name__ == "__main__":
    WORDINGS.write_text(wordings(), encoding="utf-8")
