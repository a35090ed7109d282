"""Questions and instructions made of Python's own library, for a target to answer: `{messages: [{role: user, content}]}`.

A question's key is the file of its module: those on one module are all trained on or all held out, and what two modules say
in the same words is asked about in the first of them alone.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from longspec.demo.library_units import Unit, read_units
from longspec.demo.question_words import ORDERS, TASKS, Task

# Fewer words of a first sentence name nothing to write or to explain ("Close the file").
FEWEST_WORDS = 5
MOST_UNITS = 40  # of one module, or a single large one (tkinter) would be asked about in every tenth question
SHORTEST_TEXT = 80  # characters of a documentation or of code that is worth a question
# Verbs as orders, and as statements with an s.
VERBS = ORDERS.split()
STATEMENTS = {f"{verb}{'es' if verb.endswith(('ch', 'x', 'ss', 'sh')) else 's'}": verb for verb in VERBS} | {
    "copies": "copy",
    "modifies": "modify",
    "verifies": "verify",
}


def request_of(sentence: str) -> str:
    """A sentence as an order that follows "to": "Returns the sum" is "return the sum"; "" for one that is none."""
    first, _, rest = sentence.partition(" ")
    verb = STATEMENTS.get(first.lower(), first.lower())
    return f"{verb} {rest}" if verb in VERBS and rest else ""


@dataclass(frozen=True)
class Subject:
    """One unit as the wordings name its parts; `other` is another unit of its module, "" where there is none."""

    unit: Unit
    parts: dict[str, str]


def _subject(unit: Unit, others: list[str]) -> Subject:
    sentence = unit.sentence if len(unit.sentence.split()) >= FEWEST_WORDS else ""
    parts = {
        "name": unit.name,
        "documentation": unit.documentation if len(unit.documentation) >= SHORTEST_TEXT else "",
        "sentence": sentence,
        "request": request_of(sentence),
        "code": unit.code if len(unit.code) >= SHORTEST_TEXT and "```" not in unit.code else "",
        "other": others[(others.index(unit.name) + 1) % len(others)] if len(others) > 1 and unit.name in others else "",
    }
    return Subject(unit, parts)


def _subjects(folder: Path | None) -> Iterator[Subject]:
    """Every unit of the library; what an earlier module says in the same words is left out of its parts."""
    first: dict[str, str] = {}
    for path, of_module in groupby(read_units(folder), key=lambda unit: unit.path):
        units = list(of_module)
        names = [unit.name for unit in units if unit.kind != "module"]
        for subject in (_subject(unit, names) for unit in units):
            for part, text in subject.parts.items():
                if first.setdefault(" ".join(text.lower().split()), path) != path:
                    subject.parts[part] = ""
            yield subject


def _drawn(subjects: Iterator[Subject], rng: random.Random) -> list[Subject]:
    """The subjects, of a module that has more than MOST_UNITS so many."""
    drawn = []
    for _, of_module in groupby(subjects, key=lambda subject: subject.unit.path):
        those = list(of_module)
        drawn += rng.sample(those, min(len(those), MOST_UNITS))
    return drawn


def _askable(task: Task, subjects: list[Subject]) -> list[Subject]:
    needed = [part for part in (task.about, "other") if any(f"{{{part}}}" in wording for wording in task.wordings)]
    return [each for each in subjects if each.unit.kind in task.kinds and all(each.parts[part] for part in needed)]


def generate(
    records: int, seed: int, min_characters: int = 0, max_characters: int = 4000, folder: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and record of `records` different questions of min_characters..max_characters; of the library in `folder`.

    A function of the arguments and the library; fewer records are the first of more. Raises ValueError when the library
    has not enough to ask about.
    """
    rng = random.Random(f"{seed}:questions")
    subjects = _drawn(_subjects(folder), rng)
    left = {task: _askable(task, subjects) for task in TASKS}
    for of_task in left.values():
        rng.shuffle(of_task)
    asked: set[str] = set()
    while len(asked) < records:
        open_tasks = [task for task in TASKS if left[task]]
        if not open_tasks:
            raise ValueError(
                f"records: {records} questions of {min_characters} to {max_characters} characters were asked for, but this "
                f"Python's library gives {len(asked)}; lower records, or widen min_characters and max_characters"
            )
        task = rng.choices(open_tasks, [each.weight for each in open_tasks])[0]
        subject, wording = left[task].pop(), rng.choice(task.wordings)
        question = wording.format(**subject.parts)
        if min_characters <= len(question) <= max_characters and question not in asked:
            asked.add(question)
            unit = subject.unit
            yield unit.path, {"messages": [{"role": "user", "content": question}], "about": unit.name, "path": unit.path}
