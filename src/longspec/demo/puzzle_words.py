"""The wordings in which the number puzzles and the search for their solution are told."""

from dataclasses import dataclass

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
