"""Check errors by place and facts, not by their English.

An error of ours begins with its place: a file, a key, an option. Facts are values, paths, commands to type. The wordings of all
functions that raise stand in tests/golden/wordings.txt, where a change of words shows as a difference of one line:

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
_COMMAND = re.compile(r"`[^`]*`|\b(longspec|make|pip|python|rm|snakemake) .*")

Caught = pytest.ExceptionInfo[BaseException]
Place = str | Path | re.Pattern[str]  # a pattern where it is at a key or below it
Fact = str | int | Path | re.Pattern[str]


@contextmanager
def refused(place: Place, *facts: Fact, kind: type[BaseException] = ValueError) -> Iterator[Caught]:
    """The block raises an error of this place whose text has each of the facts; SystemExit's has "error: " before it."""
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
        place = re.compile(rf"{re.escape(str(place).replace(here, ''))}(?![\w/-]|\.\w)")
    assert place.match(text), f"{place.pattern} is not the start of: {text}"
    for fact in facts:
        found = fact.search(text) if isinstance(fact, re.Pattern) else str(fact).replace(here, "") in text
        assert found, f"{fact!r} is not in: {text}"
        is_sentence = _SENTENCE.search(_COMMAND.sub("", str(fact)))
        assert not is_sentence, f"{fact!r} is a wording; name a value, a path, a key or a command of it"


def _template(node: ast.expr) -> str:
    """The text of an expression, with braces around what is inserted."""
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
    """The texts of three words and more below a node, in their order, but for docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            told = " ".join(_template(child).split())
            if told.count(" ") > 1 and not isinstance(node, ast.Expr):
                yield told
        else:
            yield from _texts(child)


def wordings() -> str:
    """A line for each text of the functions that raise, and of those functions and constants that are named where they do."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "src/longspec").rglob("*.py"))}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    raised = [node.exc for _, node in nodes if isinstance(node, ast.Raise) and node.exc]
    named = {name.id for each in raised for name in ast.walk(each) if isinstance(name, ast.Name)}
    lines = []
    for path, node in sorted(nodes, key=lambda pair: (pair[0], getattr(pair[1], "lineno", 0))):
        match node:
            case ast.FunctionDef(name=name) if name in named or any(isinstance(each, ast.Raise) for each in ast.walk(node)):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) if name in named and name.isupper():
                pass
            case _:
                continue
        lines += [f"{path.relative_to(ROOT / 'src')}: {name}: {told}\n" for told in _texts(node)]
    return "".join(lines).replace('"', "'")  # which of them stand in an expression depends on Python's version


if __name__ == "__main__":
    WORDINGS.write_text(wordings(), encoding="utf-8")
