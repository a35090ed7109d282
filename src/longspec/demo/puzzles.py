"""Long chain-of-thought made here: number puzzles, solved by a backtracking search that writes its reasoning down."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MIN_CHARACTERS, MAX_CHARACTERS = 750, 6500
LARGEST = 999  # no intermediate result above it
TARGETS = range(20, 200)
# How many steps the search tries from a set of numbers, by the set's size. It prunes, so it may fail.
TRIES = {6: 2, 5: 2, 4: 3, 3: 3}
SLIPS = 0.08  # share of steps that are said with a slip, which is corrected at once

PROBLEMS = (
    "Use the numbers {numbers} and the operations + - * / to reach {target}. Each number may be used at most once.",
    "Reach the target {target} with the numbers {numbers}. You may add, subtract, multiply and divide, and use each "
    "number once at most.",
    "Numbers: {numbers}. Target: {target}. Combine them with + - * / so that the result is the target; no number "
    "may be used twice.",
    "Find an expression that equals {target}. It may use each of {numbers} at most once, and only + - * /.",
)


# Three narrators: for each, the sentences of a search by what they say.
STYLES = (
    {
        "start": "I have {numbers} and want {target}.",
        "attempt": "Try {equation}. Left: {left}.",
        "correct": "Try {term}. Is it {wrong}? No, let me count again: {equation}. Left: {left}.",
        "last_two": "With {pair}: {equations}.",
        "none": " None of them is {target}. Dead end, go back to {back}.",
        "exhausted": "Nothing more to try with {numbers}. Go back to {back}.",
        "seen": "I have been at {numbers} before. Go back to {back}.",
        "hit": " That is {target}!",
        "check": "Check: {equations}. Used: {used}, each once.",
        "answer": "Answer: {expression} = {target}",
    },
    {
        "start": "Let me think. The numbers are {numbers}, the target is {target}.",
        "attempt": "What about {equation}? Then I have {left}.",
        "correct": "What about {term}? I said {wrong}, but that is wrong: {equation}. Then I have {left}.",
        "last_two": "Two numbers, {pair}: {equations}.",
        "none": " No {target} here, so back to {back}.",
        "exhausted": "{numbers} leads nowhere. Back to {back}.",
        "seen": "Wait, {numbers} was tried already. Back to {back}.",
        "hit": " Yes, {target}!",
        "check": "Let me verify: {equations}. I used {used}, no number twice.",
        "answer": "So the answer is {expression} = {target}",
    },
    {
        "start": "Goal: {target}. Numbers: {numbers}.",
        "attempt": "Step: {equation}; now {left}.",
        "correct": "Step: {term}, which is {wrong}... no, correction: {equation}; now {left}.",
        "last_two": "Last pair {pair}: {equations}.",
        "none": " Not {target}. Undo, return to {back}.",
        "exhausted": "All good steps from {numbers} failed. Undo, return to {back}.",
        "seen": "Already seen: {numbers}. Undo, return to {back}.",
        "hit": " Found {target}.",
        "check": "Verification: {equations}. Numbers used: {used}.",
        "answer": "Final answer: {expression} = {target}",
    },
)


@dataclass(frozen=True)
class Term:
    """Hold a number: its value, how it is written, the equations that made it, and the given numbers that it uses."""

    value: int
    expression: str
    equations: tuple[str, ...] = ()
    used: tuple[int, ...] = ()


Move = tuple[int, int, int, str]  # the result, where the larger and the smaller term stand, the operator


class TooLongError(Exception):
    """Say that the search wrote more than a record may hold."""


def _moves(terms: list[Term]) -> list[Move]:
    """Return the steps whose result is a positive whole number in bounds, without those that change nothing."""
    moves = []
    for i in range(len(terms)):
        for j in range(i):
            high, low = (i, j) if terms[i].value > terms[j].value else (j, i)
            a, b = terms[high].value, terms[low].value
            results = {"+": a + b, "-": a - b, "*": a * b if b > 1 else 0, "/": a // b if b > 1 and a % b == 0 else 0}
            moves += [(value, high, low, operator) for operator, value in results.items() if 0 < value <= LARGEST]
    return moves


def _taken(terms: list[Term], move: Move) -> list[Term]:
    """Return the terms after a step; the one that it makes comes last."""
    value, high, low, operator = move
    a, b = terms[high], terms[low]
    left, right = (f"({term.expression})" if term.equations else term.expression for term in (a, b))
    equation = f"{a.value} {operator} {b.value} = {value}"
    made = Term(value, f"{left} {operator} {right}", (*a.equations, *b.equations, equation), a.used + b.used)
    return [*(term for place, term in enumerate(terms) if place not in (high, low)), made]


def _numbers(terms: list[Term]) -> str:
    return ", ".join(str(term.value) for term in terms)


class Search:
    """Search depth-first and say what is done; `lines` is the story so far."""

    def __init__(self, target: int, style: dict[str, str], rng: random.Random) -> None:
        self.target, self.style, self.rng = target, style, rng
        self.lines: list[str] = []
        self.seen: set[tuple[int, ...]] = set()
        self.characters = 0

    def say(self, *sentences: str, **values: Any) -> None:
        """Add a line of reasoning. Raises TooLongError."""
        self.lines.append("".join(self.style[sentence] for sentence in sentences).format(target=self.target, **values))
        self.characters += len(self.lines[-1]) + 1
        if self.characters > MAX_CHARACTERS:
            raise TooLongError

    def solve(self, terms: list[Term], back: str) -> Term | None:
        """Return the term that equals the target, or None. back: names the numbers to return to."""
        state, numbers = tuple(sorted(term.value for term in terms)), _numbers(terms)
        if state in self.seen:
            self.say("seen", numbers=numbers, back=back)
            return None
        self.seen.add(state)
        if len(terms) == 2:
            return self.last_two(terms, back)
        for move in sorted(_moves(terms), key=self.rank)[: TRIES[len(terms)]]:
            after = _taken(terms, move)
            self.tell(after)
            if after[-1].value == self.target:
                self.lines[-1] += self.style["hit"].format(target=self.target)
                return after[-1]
            found = self.solve(after, numbers)
            if found is not None:
                return found
        if back:
            self.say("exhausted", numbers=numbers, back=back)
        return None

    def rank(self, move: Move) -> float:
        """Return how little a step promises: its distance from the target, and chance."""
        distance = abs(move[0] - self.target) / self.target
        return min(distance, 2.0) + 1.5 * self.rng.random()

    def tell(self, after: list[Term]) -> None:
        """Say a step, now and then with a slip that is corrected at once."""
        equation, left = after[-1].equations[-1], _numbers(after)
        if self.rng.random() < SLIPS:
            wrong = after[-1].value + self.rng.choice((-10, -2, -1, 1, 2, 10))
            self.say("correct", wrong=wrong, term=equation.split(" = ")[0], equation=equation, left=left)
        else:
            self.say("attempt", equation=equation, left=left)

    def last_two(self, terms: list[Term], back: str) -> Term | None:
        """Try everything that two numbers allow; return the term that equals the target, or None."""
        results = [_taken(terms, move)[-1] for move in _moves(terms)]
        hit = next((number for number, term in enumerate(results) if term.value == self.target), None)
        told = results if hit is None else results[: hit + 1]
        equations = ", ".join(term.equations[-1] for term in told)
        self.say("last_two", "none" if hit is None else "hit", pair=_numbers(terms), equations=equations, back=back)
        return None if hit is None else results[hit]


def _puzzle(rng: random.Random) -> tuple[list[int], int]:
    """Return numbers, and a target that some expression over most of them reaches, but no single step."""
    while True:
        count = rng.choice((4, 4, 5, 5, 6))
        numbers = [rng.choice((25, 50, 75, 100)) if rng.random() < 0.1 else rng.randint(2, 20) for _ in range(count)]
        start = terms = [Term(number, str(number)) for number in numbers]
        for _ in range(count - rng.choice((1, 1, 2))):
            moves = _moves(terms)
            if not moves:
                break
            terms = _taken(terms, rng.choice(moves))
        else:
            target = terms[-1].value
            if target in TARGETS and target not in numbers and all(move[0] != target for move in _moves(start)):
                return numbers, target


def _attempt(rng: random.Random) -> tuple[str, dict[str, Any]] | None:
    """Return a puzzle's key and record; None if the search gave up, or if the story is too short or too long."""
    numbers, target = _puzzle(rng)
    search = Search(target, rng.choice(STYLES), rng)
    listed = ", ".join(map(str, numbers))
    search.say("start", numbers=listed)
    try:
        found = search.solve([Term(number, str(number), used=(number,)) for number in numbers], "")
        if found is None:
            return None
        search.say("check", equations=", ".join(found.equations), used=", ".join(map(str, found.used)))
        search.say("answer", expression=found.expression)
    except TooLongError:
        return None
    story = "\n".join(search.lines)
    if not MIN_CHARACTERS <= len(story) <= MAX_CHARACTERS:
        return None
    problem = rng.choice(PROBLEMS).format(numbers=listed, target=target)
    # The key is the puzzle, not its wording: no puzzle is both trained on and held out.
    key = f"{','.join(map(str, sorted(numbers)))}={target}"
    return key, {"problem": problem, "qwq": story}


def generate(records: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and record of each puzzle; record number i is a function of (seed, i) alone."""
    for index in range(records):
        rng = random.Random(f"{seed}:{index}")
        made = None
        while made is None:
            made = _attempt(rng)
        yield made
