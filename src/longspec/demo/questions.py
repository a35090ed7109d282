"""Questions and instructions about Python's own library, for a target to answer: `{messages: [{role: user, content}]}`.

A question's key is the file of its module: all questions on a module are trained on, or all are held out. What two modules say
in the same words is asked about in the first of them only.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from longspec.demo.stdlib import Unit, read_units

# A first sentence of fewer words names nothing to write or to explain ("Close the file").
FEWEST_WORDS = 5
MOST_UNITS = 40  # of one module; else a single large one (tkinter) would be asked about in every tenth question
SHORTEST_TEXT = 80  # characters of documentation or code that are worth a question
KINDS = ("module", "class", "function")
Subject = tuple[Unit, dict[str, str]]  # a unit and its parts as the wordings name them
# Wordings about documentation or code are followed by it.
ENDS = {"documentation": "\n\n{documentation}", "code": "\n\n```python\n{code}\n```"}


@dataclass(frozen=True)
class Task:
    """Hold one kind of question. about: the part of a unit that it asks about; kinds: of which units; weight: how often."""

    about: str  # name | sentence | request | documentation | code
    weight: int
    kinds: tuple[str, ...]
    wordings: tuple[str, ...]


# Braces hold parts of a unit: its name, documentation, code; the documentation's first sentence; a request, which is this
# sentence as an order ("return the sum"); the name of another unit of the same module.
# For each task: the part that it is about, its weight, the kind of unit if there is only one, and its wordings.
TEXT = """
name 4
    What does {name} do?
    Explain what {name} does.
    Explain {name} to someone who is new to Python.
    In one sentence: what is {name} for?
    When would you use {name}?
name 2
    Give a short example of how {name} is used.
    Show me some code that uses {name}.
name 2 function
    What does {name} return?
    What are the arguments of {name}?
name 1
    What is the difference between {name} and {other}?
    Compare {name} with {other}.
request 5 function
    Write a Python function that does the following: {request}.
    Write a function to {request}.
    How can I {request} in Python? Write the code.
    I need a small Python function that can {request}. Explain it step by step.
    Write a Python function to {request}. Add a docstring and an example.
sentence 2
    Say this more simply: "{sentence}."
    Rewrite this sentence in three different ways: "{sentence}."
    Correct any mistakes in this sentence and make it more formal: "{sentence}."
sentence 2
    What do you have to know to understand this sentence? "{sentence}."
    Ask three questions about this sentence and answer them: "{sentence}."
    Explain the words of this sentence one by one: "{sentence}."
sentence 2
    Write a short e-mail that tells a colleague about a new tool. What it does: {sentence}.
    Write a short paragraph for a news page about a program. What it does: {sentence}.
    Give five ideas of how this could be used in daily life: {sentence}.
    Write a story of a few sentences in which someone needs this: {sentence}.
documentation 4
    Summarise this documentation:
    Summarise the following text in two sentences.
    What is the main point of this text?
    Read the text and give it a title.
documentation 3
    Rewrite this docstring so that a beginner understands it:
    Rewrite this documentation as a list of points:
    Make this text shorter, but leave nothing important out:
documentation 3
    List the most important terms of this text and say what each one means.
    Write three questions that this text answers, with the answers.
    What is not clear in this documentation?
documentation 3
    Write Python code that fits this documentation of {name}:
    Here is the documentation of {name}. Show how it is used.
code 5
    What does this code do?
    Explain this code step by step:
    Explain the following Python code to a beginner.
    Summarise this code in one or two sentences.
code 2 function
    What does this function return?
    Which values can this function return?
code 3
    Write a docstring for this code:
    Add comments to this code.
    Write the documentation of {name}, whose code this is:
code 3
    Rewrite this code so that it is easier to read.
    How could this code be made better?
    Find possible errors in this code.
code 2
    Write a test for this code.
    Which cases should a test of this code look at?
"""


def _tasks() -> list[Task]:
    made: list[Task] = []
    for line in TEXT.strip().splitlines():
        if line.startswith(" "):
            made[-1] = replace(made[-1], wordings=(*made[-1].wordings, line.strip() + ENDS.get(made[-1].about, "")))
        else:
            about, weight, *kinds = line.split()
            made.append(Task(about, int(weight), tuple(kinds) or KINDS, ()))
    return made


TASKS = _tasks()

# Verbs that begin a docstring which says what to do; a docstring that begins otherwise is no order.
ORDERS = (
    "add append build calculate change check clear compare compile compute convert copy count create decode delete determine "
    "display encode execute expand extract fill find fix format generate get give guess handle insert iterate join list load "
    "make map match merge move normalize open parse print process produce quote read record remove rename replace report "
    "return reverse run save scan search select send set show skip sort split start store strip test transform translate "
    "turn update validate verify walk wrap write yield"
)
VERBS = ORDERS.split()
# The same verbs as statements.
STATEMENTS = {f"{verb}{'es' if verb.endswith(('ch', 'x', 'ss', 'sh')) else 's'}": verb for verb in VERBS} | {
    "copies": "copy",
    "modifies": "modify",
    "verifies": "verify",
}


def request_of(sentence: str) -> str:
    """Return a sentence as an order that follows "to": "Returns the sum" is "return the sum"; "" for one that is none."""
    first, _, rest = sentence.partition(" ")
    verb = STATEMENTS.get(first.lower(), first.lower())
    return f"{verb} {rest}" if verb in VERBS and rest else ""


def _parts(unit: Unit, others: list[str]) -> dict[str, str]:
    """Return what the wordings may name of a unit, "" for what it lacks. others: names of the units of its module."""
    sentence = unit.sentence if len(unit.sentence.split()) >= FEWEST_WORDS else ""
    return {
        "name": unit.name,
        "documentation": unit.documentation if len(unit.documentation) >= SHORTEST_TEXT else "",
        "sentence": sentence,
        "request": request_of(sentence),
        "code": unit.code if len(unit.code) >= SHORTEST_TEXT and "```" not in unit.code else "",
        "other": others[(others.index(unit.name) + 1) % len(others)] if len(others) > 1 and unit.name in others else "",
    }


def _subjects(folder: Path | None, rng: random.Random) -> list[Subject]:
    """Return the library's units with their parts, at most MOST_UNITS of each module.

    What an earlier module says in the same words is left out of the parts.
    """
    subjects: list[Subject] = []
    first: dict[str, str] = {}
    for path, of_module in groupby(read_units(folder), key=lambda unit: unit.path):
        units = list(of_module)
        names = [unit.name for unit in units if unit.kind != "module"]
        found = [(unit, _parts(unit, names)) for unit in units]
        for _, parts in found:
            for part, text in parts.items():
                if first.setdefault(" ".join(text.lower().split()), path) != path:
                    parts[part] = ""
        subjects += rng.sample(found, min(len(found), MOST_UNITS))
    return subjects


def generate(
    records: int, seed: int, min_characters: int = 0, max_characters: int = 4000, folder: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield key and record of `records` different questions of min_characters..max_characters, of the library in `folder`.

    They depend on arguments and library alone; fewer records are the first of more. Raises ValueError if the library has not
    enough to ask about.
    """
    rng = random.Random(f"{seed}:questions")
    subjects = _subjects(folder, rng)
    left: dict[Task, list[Subject]] = {}
    for task in TASKS:
        needed = [part for part in (task.about, "other") if any(f"{{{part}}}" in wording for wording in task.wordings)]
        left[task] = [each for each in subjects if each[0].kind in task.kinds and all(each[1][part] for part in needed)]
        rng.shuffle(left[task])
    asked: set[str] = set()
    while len(asked) < records:
        open_tasks = [task for task in TASKS if left[task]]
        if not open_tasks:
            raise ValueError(
                f"records: {records} questions of {min_characters} to {max_characters} characters were asked for, but this "
                f"Python's library gives {len(asked)}; lower records, or widen min_characters and max_characters"
            )
        task = rng.choices(open_tasks, [each.weight for each in open_tasks])[0]
        (unit, parts), wording = left[task].pop(), rng.choice(task.wordings)
        question = wording.format(**parts)
        if min_characters <= len(question) <= max_characters and question not in asked:
            asked.add(question)
            yield unit.path, {"messages": [{"role": "user", "content": question}], "about": unit.name, "path": unit.path}
