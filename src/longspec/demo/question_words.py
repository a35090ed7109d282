"""The wordings of questions and instructions about a unit of Python's library. In braces stand a unit's parts.

name: textwrap.dedent; documentation, code; sentence: the documentation's first; request: it as an order, "return the sum";
other: the name of another unit of the same module.
"""

from dataclasses import dataclass, replace

KINDS = ("module", "class", "function")
# Wordings about a documentation or code are followed by it.
ENDS = {"documentation": "\n\n{documentation}", "code": "\n\n```python\n{code}\n```"}


@dataclass(frozen=True)
class Task:
    """One kind of question. about: the part of a unit that it asks about; kinds: of which units; weight: how often."""

    about: str  # name | sentence | request | documentation | code
    weight: int
    kinds: tuple[str, ...]
    wordings: tuple[str, ...]


# Of each task the part that it is about, its weight, the kind of unit where it is for one alone, and its wordings.
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

# Verbs with which a docstring begins that says what to do; what begins otherwise is no order.
ORDERS = (
    "add append build calculate change check clear compare compile compute convert copy count create decode delete determine "
    "display encode execute expand extract fill find fix format generate get give guess handle insert iterate join list load "
    "make map match merge move normalize open parse print process produce quote read record remove rename replace report "
    "return reverse run save scan search select send set show skip sort split start store strip test transform translate "
    "turn update validate verify walk wrap write yield"
)
