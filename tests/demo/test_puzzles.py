"""The puzzles' arithmetic, redone with Python's own."""

import re
from collections import Counter
from itertools import islice

from longspec.demo import puzzles

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def numbers_and_target(problem: str) -> tuple[list[int], int]:
    """The numbers and the target of a problem, whatever its wording."""
    found = re.search(r"\d+(?:, \d+)+", problem)
    assert found
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
        assert found
        assert eval(found[1]) == target == int(found[2])
        assert not Counter(map(int, re.findall(r"\d+", found[1]))) - Counter(numbers)
    assert written > 2000


def test_record_is_a_function_of_seed_and_index() -> None:
    assert list(puzzles.generate(12, seed=7))[:5] == list(puzzles.generate(5, seed=7))
    assert next(islice(puzzles.generate(1, seed=8), 1)) != next(islice(puzzles.generate(1, seed=7), 1))
