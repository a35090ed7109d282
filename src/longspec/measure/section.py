"""Define the keys of the section `evaluation` in config/workflow.yaml. tasks.py checks which go together. No torch here."""

from typing import Annotated

from pydantic import Field

from longspec.config.typed import Filled, Flag, Keys, Name, Seed, Temperature, Text, Tokens, Whole, left_out, means, words
from longspec.decode.levels import DEEPEST, MOST_COPIED
from longspec.engines import ENGINES, OURS

AUTO = "auto"
MOST_NODES = 1024  # of a tree: a forward of so many tokens takes longer than the rounds it could save
Nodes = Annotated[Whole, Field(ge=1, le=MOST_NODES)]
Depth = Annotated[Whole, Field(ge=1, le=64)]


class BudgetKeys(Keys):
    """Hold a tree's budget: the likeliest nodes by the draft's own probabilities, and no level that they do not pay for."""

    nodes: Nodes = means("the most drafted tokens that are verified in a round")
    depth: Depth = Field(DEEPEST, description="the most levels")


Shape = Annotated[
    Nodes | Annotated[list[Nodes], Field(min_length=1, max_length=64)] | BudgetKeys,
    means("a number of tokens (a chain), a list of levels (a tree), or {nodes, depth} (a tree by a budget)"),
]
SOURCE = "a file of prompts, a glob, a list of files, or hf:<owner>/<repository>[:config][:split] or .../<file>"


class TaskEntry(Keys):
    """Hold one task: held-out records of a data set (`data`, `context`), or prompts of a file (`source`, `template`, ...)."""

    data: Name = left_out("the data set whose held-out records are the prompts")
    context: Annotated[list[Tokens], Field(min_length=2, max_length=2)] = left_out(
        "the shortest and the longest prompt in tokens, for instance [64, 448]"
    )
    whole_questions: Annotated[bool | str, words(True, False, AUTO)] = left_out(
        "whether prompts end where the target is asked to answer; auto: where the records are conversations"
    )
    preset: Text = left_out("a name in config/evaluation.yaml")
    revision: Filled = left_out("a branch, tag or commit of prompts on the hub, in quotes if it reads like a number")
    member: Filled = left_out("the file to read in an archive of the hub, for instance data/lcc.jsonl")
    source: Filled | Annotated[list[Filled], Field(min_length=1)] = left_out("where the prompts come from", title=SOURCE)
    template: Filled = left_out("the prompt's text with the record's fields in braces")
    chat: Flag = left_out("whether the target's chat template is laid around the prompt")
    reference: Text = left_out('the field of an answer to read beside the target\'s, "" for none')
    longest: Annotated[Whole, Field(ge=0, le=2**24)] = left_out(
        "the number of tokens to which a prompt is cut in its middle, 0 for the target's own limit"
    )
    new_tokens: Tokens = left_out("the number of tokens decoded after each prompt")


Tasks = Annotated[dict[Name, TaskEntry | None], Field(min_length=1)]
TASKS = "a mapping from task names to {data, context} or {preset, source}; null leaves a task of the base out"


class Bench(Keys):
    """Say how drafts are measured; what a run measures apart (`bench`) has these keys in place of the evaluation's."""

    prompts: Annotated[Whole, Field(ge=1, le=10**6)] = left_out("the number of prompts of each task")
    new_tokens: Tokens = left_out("the number of tokens decoded after each prompt")
    temperatures: Annotated[list[Temperature], Field(min_length=1)] = left_out(
        "a list of temperatures, for instance [0]; 0 is greedy"
    )
    shapes: Annotated[list[Shape], Field(min_length=1)] = left_out(
        "shapes of drafts, for instance [4, [4, 16, 16, 16, 16], {nodes: 16}]: a chain's tokens, a tree's levels, its budget"
    )
    repeats: Annotated[Whole, Field(ge=1, le=1000)] = left_out("how often each prompt is decoded with and without draft")
    seed: Seed = left_out("the seed of random draws")
    engine: Annotated[str, words(OURS, *ENGINES)] = Field(
        OURS, description="what decodes; another engine than longspec: for drafts that it loads"
    )
    with_lookup: Annotated[Whole, Field(ge=1, le=MOST_COPIED)] | None = Field(
        None, description="most tokens of prompt lookup beside the published draft's, such as 8; null: it is measured alone"
    )
    serve_python: Filled | None = Field(
        None, description="the Python interpreter of the engine's environment; null: .venv-serve/<engine>/bin/python"
    )
    draft_vocabulary: Tokens | None = Field(
        None,
        description="a number of tokens that a draft which shares the target's head looks at while it decodes; null: all; a "
        "draft with a vocabulary of its own keeps it",
    )
    tasks: Tasks = Field(description=TASKS)


class Evaluation(Bench):
    """Hold the whole section."""

    tasks: Tasks = left_out(f"{TASKS}; left out: held-out records of the data that a run trains on")
    bench: Bench = left_out("what a run measures apart, by `snakemake bench`")
