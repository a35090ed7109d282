"""Long chain-of-thought made here: number puzzles, solved by a backtracking search that writes down its reasoning."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MIN_CHARACTERS, MAX_CHARACTERS = 750, 6500
LARGEST = 999  # no intermediate result above it
TARGETS = range(20, 200)
# How many steps the search tries from a set of numbers, by the set's size: it prunes, so it may fail.
TRIES = {6: 2, 5: 2, 4: 3, 3: 3}
SLIPS = 0.08  # share of steps told with a slip of the tongue that is corrected

PROBLEMS = (
    "Use the numbers {numbers} and the operations + - * / to reach {target}. Each number may be used at most once.",
    "Reach the target {target} with the numbers {numbers}. You may add, subtract, multiply and divide, and use each "
    "number once at most.",
    "Numbers: {numbers}. Target: {target}. Combine them with + - * / so that the result is the target; no number "
    "may be used twice.",
    "Find an expression that equals {target}. It may use each of {numbers} at most once, and only + - * /.",
)


@dataclass(frozen=True)
class Style:
    """One narrator: the sentences of a search, each a format string."""

    start: str  # numbers, target
    attempt: str  # equation, left
    correct: str  # wrong, term, equation, left: a slip that the narrator notices
    last_two: str  # pair, equations
    none: str  # target, back
    exhausted: str  # numbers, back
    seen: str  # numbers, back
    hit: str  # target
    check: str  # equations, used
    answer: str  # expression, target


STYLES = (
    Style(
        start="I have {numbers} and want {target}.",
        attempt="Try {equation}. Left: {left}.",
        correct="Try {term}. Is it {wrong}? No, let me count again: {equation}. Left: {left}.",
        last_two="With {pair}: {equations}.",
        none=" None of them is {target}. Dead end, go back to {back}.",
        exhausted="Nothing more to try with {numbers}. Go back to {back}.",
        seen="I have been at {numbers} before. Go back to {back}.",
        hit=" That is {target}!",
        check="Check: {equations}. Used: {used}, each once.",
        answer="Answer: {expression} = {target}",
    ),
    Style(
        start="Let me think. The numbers are {numbers}, the target is {target}.",
        attempt="What about {equation}? Then I have {left}.",
        correct="What about {term}? I said {wrong}, but that is wrong: {equation}. Then I have {left}.",
        last_two="Two numbers, {pair}: {equations}.",
        none=" No {target} here, so back to {back}.",
        exhausted="{numbers} leads nowhere. Back to {back}.",
        seen="Wait, {numbers} was tried already. Back to {back}.",
        hit=" Yes, {target}!",
        check="Let me verify: {equations}. I used {used}, no number twice.",
        answer="So the answer is {expression} = {target}",
    ),
    Style(
        start="Goal: {target}. Numbers: {numbers}.",
        attempt="Step: {equation}; now {left}.",
        correct="Step: {term}, which is {wrong}... no, correction: {equation}; now {left}.",
        last_two="Last pair {pair}: {equations}.",
        none=" Not {target}. Undo, return to {back}.",
        exhausted="All good steps from {numbers} failed. Undo, return to {back}.",
        seen="Already seen: {numbers}. Undo, return to {back}.",
        hit=" Found {target}.",
        check="Verification: {equations}. Numbers used: {used}.",
        answer="Final answer: {expression} = {target}",
    ),
)


@dataclass(frozen=True)
class Term:
    """A number in hand: its value, how it is written, the equations that made it, the given numbers it uses."""

    value: int
    expression: str
    equations: tuple[str, ...] = ()
    used: tuple[int, ...] = ()


Move = tuple[int, int, int, str]  # the result, where the larger and the smaller term stand, the operator


class TooLongError(Exception):
    """The search wrote more than a record may hold."""


def _value(a: int, b: int, operator: str) -> int:
    """`a operator b` for a >= b; 0 when it is no positive whole number in bounds or changes nothing."""
    if operator == "+":
        value = a + b
    elif operator == "-":
        value = a - b
    elif b == 1:
        return 0
    elif operator == "*":
        value = a * b
    else:
        value = 0 if a % b else a // b
    return value if value <= LARGEST else 0


def _moves(terms: list[Term]) -> list[Move]:
    moves = []
    for i in range(len(terms)):
        for j in range(i):
            high, low = (i, j) if terms[i].value > terms[j].value else (j, i)
            for operator in "+-*/":
                value = _value(terms[high].value, terms[low].value, operator)
                if value:
                    moves.append((value, high, low, operator))
    return moves


def _make(terms: list[Term], move: Move) -> Term:
    value, high, low, operator = move
    a, b = terms[high], terms[low]
    left, right = (f"({term.expression})" if term.equations else term.expression for term in (a, b))
    equation = f"{a.value} {operator} {b.value} = {value}"
    expression = f"{left} {operator} {right}"
    return Term(value, expression, (*a.equations, *b.equations, equation), a.used + b.used)


def _after(terms: list[Term], move: Move, made: Term) -> list[Term]:
    return [term for k, term in enumerate(terms) if k not in move[1:3]] + [made]


def _numbers(terms: list[Term]) -> str:
    return ", ".join(str(term.value) for term in terms)


@dataclass
class Search:
    """A depth-first search that tells what it does; `lines` is the story so far."""

    target: int
    style: Style
    rng: random.Random
    lines: list[str] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    characters: int = 0

    def say(self, line: str) -> None:
        """Add a line of reasoning. Raises TooLongError."""
        self.lines.append(line)
        self.characters += len(line) + 1
        if self.characters > MAX_CHARACTERS:
            raise TooLongError

    def solve(self, terms: list[Term], back: str) -> Term | None:
        """Return the term that equals the target, or None; `back` names the numbers to return to."""
        state = tuple(sorted(term.value for term in terms))
        if state in self.seen:
            self.say(self.style.seen.format(numbers=_numbers(terms), back=back))
            return None
        self.seen.add(state)
        if len(terms) == 2:
            return self.last_two(terms, back)
        tries = TRIES[len(terms)]
        ranked = sorted(_moves(terms), key=self.rank)[:tries]
        for move in ranked:
            term = _make(terms, move)
            after = _after(terms, move, term)
            self.tell(term, after)
            if term.value == self.target:
                self.lines[-1] += self.style.hit.format(target=self.target)
                return term
            found = self.solve(after, _numbers(terms))
            if found is not None:
                return found
        if back:
            self.say(self.style.exhausted.format(numbers=_numbers(terms), back=back))
        return None

    def rank(self, move: Move) -> float:
        """Say how little a step promises: far from the target is bad, chance has its say."""
        distance = abs(move[0] - self.target) / self.target
        return min(distance, 2.0) + 1.5 * self.rng.random()

    def tell(self, term: Term, after: list[Term]) -> None:
        """Say a step, now and then with a slip that is corrected at once."""
        equation, left = term.equations[-1], _numbers(after)
        if self.rng.random() < SLIPS:
            wrong = term.value + self.rng.choice((-10, -2, -1, 1, 2, 10))
            step = equation.split(" = ")[0]
            self.say(self.style.correct.format(wrong=wrong, term=step, equation=equation, left=left))
        else:
            self.say(self.style.attempt.format(equation=equation, left=left))

    def last_two(self, terms: list[Term], back: str) -> Term | None:
        """Try everything that two numbers allow."""
        results = [_make(terms, move) for move in _moves(terms)]
        hits = [term for term in results if term.value == self.target]
        if hits:
            results = results[: results.index(hits[0]) + 1]
        equations = ", ".join(term.equations[-1] for term in results)
        line = self.style.last_two.format(pair=_numbers(terms), equations=equations)
        if hits:
            self.say(line + self.style.hit.format(target=self.target))
            return hits[0]
        self.say(line + self.style.none.format(target=self.target, back=back))
        return None


def _puzzle(rng: random.Random) -> tuple[list[int], int]:
    """Numbers and a target that some expression over most of them reaches, and no single step."""
    while True:
        count = rng.choice((4, 4, 5, 5, 6))
        numbers = [rng.choice((25, 50, 75, 100)) if rng.random() < 0.1 else rng.randint(2, 20) for _ in range(count)]
        start = terms = [Term(number, str(number)) for number in numbers]
        for _ in range(count - rng.choice((1, 1, 2))):
            moves = _moves(terms)
            if not moves:
                break
            move = rng.choice(moves)
            made = _make(terms, move)
            terms = _after(terms, move, made)
        else:
            too_easy = made.value in numbers or any(move[0] == made.value for move in _moves(start))
            if made.value in TARGETS and not too_easy:
                return numbers, made.value


def _attempt(rng: random.Random) -> tuple[str, dict[str, Any]] | None:
    """Return one puzzle and its story; None when the search gave up, or the story is too short or too long."""
    numbers, target = _puzzle(rng)
    style = rng.choice(STYLES)
    search = Search(target, style, rng)
    listed = ", ".join(map(str, numbers))
    search.say(style.start.format(numbers=listed, target=target))
    try:
        found = search.solve([Term(number, str(number), used=(number,)) for number in numbers], "")
        if found is None:
            return None
        used = ", ".join(map(str, found.used))
        search.say(style.check.format(equations=", ".join(found.equations), used=used))
        search.say(style.answer.format(expression=found.expression, target=target))
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
    """Key and record of each puzzle; record number i is a function of (seed, i) alone."""
    for index in range(records):
        rng = random.Random(f"{seed}:{index}")
        made = None
        while made is None:
            made = _attempt(rng)
        yield made
