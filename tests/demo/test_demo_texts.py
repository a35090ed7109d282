"""What the demo makes: questions about Python's library, of which no code runs, and puzzles, redone by Python's arithmetic."""

import inspect
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longspec.demo import puzzles, questions
from longspec.demo.stdlib import units_of
from tests.refusals import refused

SHARED = "Return every second element of a long list, in the order in which they stand."
MODULE = '''"""About {name}: a module of a made-up library, long enough to be worth a question or two."""

from pathlib import Path

Path({mark!r}).touch()


def halve_{name}(values):
    """{shared}

    The list of {name} itself stays as it is, whatever is done with the result later on.
    """
    return values[::2]  # of {name}, as the documentation above says in more words


class Store{name}:
    """Keeps what is given to {name}, until it is asked for, and never any longer than that."""

    def fetch_{name}(self, key, otherwise=None):
        """Fetches the value of a key of {name} that was stored before."""
        return self.values.get(key, otherwise)

    def _hidden_{name}(self):
        """Nobody outside of {name} may know what this method does, or that it is there."""


def _hidden_function_{name}():
    """Nobody outside of {name} may know what this function does, or that it is there."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Modules that would leave a file behind if any of them were run."""
    folder = tmp_path / "library"
    (folder / "package").mkdir(parents=True)
    for name in ("apple", "package/pear", "package/__init__", "plum", "_private"):
        word = name.replace("/", "_").strip("_")
        text = MODULE.format(name=word, mark=str(tmp_path / f"ran {word}"), shared=SHARED)
        (folder / f"{name}.py").write_text(text)
    (folder / "latin.py").write_bytes(b'"""\xff"""\n')
    return folder


def asked(made: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [record["messages"][0]["content"] for _, record in made]


def test_units_are_those_that_python_itself_finds_in_a_module() -> None:
    units = {unit.name: unit for unit in units_of("textwrap.py", inspect.getsource(textwrap))}
    public = {f"textwrap.{name}" for name in textwrap.__all__}
    assert public <= units.keys()
    assert units["textwrap"].documentation == inspect.getdoc(textwrap)
    for name in public:
        found = getattr(textwrap, name.removeprefix("textwrap."))
        assert units[name].documentation == (inspect.getdoc(found) or "")
        assert units[name].kind == ("class" if inspect.isclass(found) else "function")
        whole = inspect.getsource(found).rstrip("\n")
        bare = re.sub(r'^    """.*?"""\n', "", whole, count=1, flags=re.DOTALL | re.MULTILINE)
        assert units[name].code == (bare if units[name].kind == "function" else whole)
    assert units["textwrap.TextWrapper.fill"].documentation == inspect.getdoc(textwrap.TextWrapper.fill)
    assert not [name for name in units if "._" in name]


def test_questions_are_different_and_about_what_is_public_and_nothing_of_the_library_is_run(library: Path) -> None:
    made = list(questions.generate(40, seed=0, folder=library))
    assert not list(library.parent.glob("ran *"))
    assert {key for key, _ in made} == {"apple.py", "package/__init__.py", "package/pear.py", "plum.py"}
    assert not [text for text in asked(made) if "_private" in text]
    named = {record["about"] for _, record in made}
    assert {"apple", "package", "apple.halve_apple", "package.pear.Storepackage_pear"} <= named
    assert not [name for name in named if "hidden" in name]
    assert made[:15] == list(questions.generate(15, seed=0, folder=library)), "fewer are the first of more"
    assert made != list(questions.generate(40, seed=1, folder=library))
    assert len(set(asked(made))) == len(made) == 40
    # The same words of two modules are asked about in the first alone.
    about = zip(made, asked(made), strict=True)
    shared = SHARED.removesuffix(".")
    assert {key for (key, _), text in about if shared in text and "the list of" not in text.lower()} <= {"apple.py"}


def test_lengths_are_kept_and_too_many_are_refused_with_what_there_is(library: Path) -> None:
    made = asked(list(questions.generate(10, 0, min_characters=100, max_characters=400, folder=library)))
    assert all(100 <= len(text) <= 400 for text in made)
    with refused("records: 5000 questions", "0 to 4000 characters", re.compile(r"gives \d+; lower records,")) as caught:
        list(questions.generate(5000, 0, folder=library))
    most = int(str(caught.value).partition("gives ")[2].partition(";")[0])
    assert len(list(questions.generate(most, 0, folder=library))) == most


EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def numbers_and_target(problem: str) -> tuple[list[int], int]:
    """The numbers and the target of a problem, whatever its wording."""
    found = re.search(r"\d+(?:, \d+)+", problem)
    numbers = [int(number) for number in found[0].split(", ")]
    rest = [int(number) for number in re.findall(r"\d+", problem.replace(found[0], ""))]
    assert len(rest) == 1
    return numbers, rest[0]


def test_every_equation_is_true_and_the_answer_takes_each_number_at_most_once() -> None:
    written = 0
    for key, record in puzzles.generate(150, seed=3):
        for equation in EQUATION.finditer(record["qwq"]):
            a, operator, b, result = equation.groups()
            assert eval(f"{a} {operator} {b}") == int(result), equation[0]
            written += 1
        # Nothing that claims an equality escapes the pattern above, the answer apart.
        *story, _ = record["qwq"].split("\n")
        assert all(len(EQUATION.findall(line)) == line.count("=") for line in story)
        numbers, target = numbers_and_target(record["problem"])
        assert key == f"{','.join(map(str, sorted(numbers)))}={target}"
        assert puzzles.MIN_CHARACTERS <= len(record["qwq"]) <= puzzles.MAX_CHARACTERS
        found = re.search(r"([-+*/() \d]+) = (\d+)$", record["qwq"])
        assert eval(found[1]) == target == int(found[2])
        assert not Counter(map(int, re.findall(r"\d+", found[1]))) - Counter(numbers)
    assert written > 2000
    # A record is a function of seed and index.
    assert list(puzzles.generate(12, seed=7))[:5] == list(puzzles.generate(5, seed=7)) != list(puzzles.generate(5, seed=8))
