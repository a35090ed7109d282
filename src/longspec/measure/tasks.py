"""Check the `evaluation` section of workflow.yaml: which tasks are evaluated, and how. No torch here: Snakemake reads it too.

A task's prompts are stretches of held-out records of the run's own data (`data`, `context`), or they are made from the fields
of a file (`source`, `template`, ...), as in benchmarks.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.atomic_files import sha256_text
from longspec.chain_length import shape_name
from longspec.config.faults import check, faults_in
from longspec.data.align.fields import compose
from longspec.data.hub import parse as parse_hub
from longspec.data.raw import is_hub
from longspec.data.read.record_checks import RecordError
from longspec.data.read.source_files import ARCHIVE
from longspec.decode.levels import Shape, depth_of, shape_of, size_of
from longspec.engines import ENGINES, OURS, Engine
from longspec.measure.section import MOST_NODES, Evaluation

# Positions kept free after prompt and answer: the last round may draft beyond the answer, and a shortened prompt is tokenized
# again, which may give a few tokens more.
ROOM = 64


@dataclass(frozen=True)
class Setting:
    """Hold how to decode: temperature 0 is greedy; shape: a chain's tokens, a tree's levels, or its budget."""

    temperature: float
    shape: Shape

    @property
    def depth(self) -> int:
        """Return the most drafted tokens that a round can keep."""
        return depth_of(self.shape)

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, {shape_name(self.shape)}"


@dataclass(frozen=True)
class Prompt:
    """Hold one prompt of a task: `ids`, from line `record` (from 0) of its file; new_tokens: the most tokens to decode."""

    task: str
    number: int
    record: int
    ids: list[int]
    new_tokens: int
    reference: str | None = None
    cut_tokens: int = 0  # tokens left out of its middle

    @property
    def hash(self) -> str:
        """Return a hash of the prompt's tokens and the number of tokens to decode."""
        return sha256_text(json.dumps([self.ids, self.new_tokens]))[:16]


@dataclass(frozen=True)
class HeldOut:
    """Hold a task with prompts of context[0] to context[1] tokens from held-out records; keys as in section.TaskEntry."""

    data: str
    context: tuple[int, int]
    new_tokens: int
    whole_questions: bool | str = False

    @property
    def origin(self) -> str:
        """Return the dataset that the prompts come from."""
        return self.data

    texts = origin  # whose records are numbered

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest prompt with its answer."""
        return self.context[1] + self.new_tokens


@dataclass(frozen=True)
class Benchmark:
    """Hold a task with prompts from a file's records; keys as in section.TaskEntry. revision: None: files of this machine."""

    source: str | list[str]
    new_tokens: int
    template: str = "{prompt}"
    chat: bool = True
    reference: str = "reference"
    longest: int = 0
    revision: str | None = None
    member: str = ""

    @property
    def origin(self) -> str:
        """Return the files that the prompts come from."""
        return self.source if isinstance(self.source, str) else ", ".join(self.source)

    @property
    def texts(self) -> str:
        """Return what holds the records that are numbered: two tasks may lay out the same ones."""
        return f"{self.origin} {self.member} {self.revision}"

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the longest prompt with its answer; above 2**24 if no key limits prompts."""
        return (self.longest or 2**24) + self.new_tokens


Task = HeldOut | Benchmark
OF_HUB = ("revision", "member")  # keys of a task only if its source is on the hub


@dataclass(frozen=True)
class Settings:
    """Hold the checked section, as section.Evaluation types it. settings: the first is the main one, shown in reports."""

    prompts: int
    repeats: int
    seed: int
    settings: list[Setting]
    new_tokens: int
    tasks: dict[str, Task]
    engine: str = OURS
    serve_python: str | None = None
    with_lookup: int | None = None

    @property
    def served_by(self) -> Engine | None:
        """Return the other engine that decodes, in its own environment; None for our own."""
        return ENGINES.get(self.engine)

    def interpreter(self, engine: Engine) -> str:
        return self.serve_python or engine.python

    @property
    def data(self) -> dict[str, str]:
        """Return each held-out task's dataset, by the task's name."""
        return {name: task.data for name, task in self.tasks.items() if isinstance(task, HeldOut)}

    def check_raw(self, raw: Mapping[str, Path]) -> None:
        """Raise ValueError if `raw` has no manifest of one of these datasets."""
        for task, data in self.data.items():
            if data not in raw:
                raise ValueError(f"--raw: the manifest of {data} is missing, which evaluation.tasks.{task}.data needs")

    @property
    def draft_tokens(self) -> int:
        """Return the most drafted tokens that a round of the main setting can keep."""
        return self.settings[0].depth


def parse(section: dict[str, Any]) -> Settings:
    """Return the checked section. Raises ValueError with the key that is unknown, missing or wrong."""
    for key in ("prompts", "repeats", "seed", "new_tokens", "temperatures", "shapes", "tasks"):
        if section.get(key) in (None, [], {}):
            raise ValueError(f"evaluation.{key}: missing or empty; give it as config/workflow.yaml does")
    check(Evaluation, section, "evaluation")
    shapes = section["shapes"]
    settings = [Setting(float(temperature), shape_of(shape)) for temperature in section["temperatures"] for shape in shapes]
    for setting in settings:
        if settings.count(setting) > 1:
            raise ValueError(f"evaluation.temperatures, evaluation.shapes: {setting} stands twice; name each once")
        if (nodes := size_of(setting.shape)) > MOST_NODES:
            raise ValueError(f"evaluation.shapes: {setting} has {nodes} nodes; {MOST_NODES} is the most")
    tasks = {name: task_of(name, task, section["new_tokens"]) for name, task in section["tasks"].items()}
    same = {name: value for name, value in section.items() if name in Settings.__dataclass_fields__ and name != "tasks"}
    found = Settings(**same, settings=settings, tasks=tasks)
    if found.served_by is not None:
        _check_engine(found, found.served_by)
    return found


def _check_engine(section: Settings, engine: Engine) -> None:
    """Raise ValueError, with the key, for a setting that this engine cannot decode or that is not measured with it."""
    instead = f"or evaluation.engine: {OURS}"
    for setting in section.settings:
        if not isinstance(setting.shape, int):
            shape = f"evaluation.shapes: {shape_name(setting.shape)}"
            raise ValueError(f"{shape}: {engine.title} drafts chains alone; give a number of tokens, {instead}")
        if setting.temperature and not engine.samples:
            raise ValueError(
                f"evaluation.temperatures: {setting.temperature:g}: text sampled by {engine.title} is not measured here; give "
                f"[0], {instead}"
            )
    if section.with_lookup is not None:
        beside = f"evaluation.with_lookup: {section.with_lookup}"
        raise ValueError(f"{beside}: {engine.title} drafts by one means alone; give null, {instead}")


def check_interpreter(python: str, engine: Engine) -> None:
    """Raise ValueError, with the command that installs it, if an engine's interpreter is missing or cannot be run."""
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        why = "is no program" if Path(python).exists() else "no such file"
        raise ValueError(
            f"evaluation.serve_python: {python}: {why}; {engine.install} makes an environment with {engine.title}, or name "
            "the interpreter of one"
        )


def task_of(name: str, settings: dict[str, Any], new_tokens: int) -> Task:
    """Return one task of the section. Raises ValueError that names the wrong key."""
    key = f"evaluation.tasks.{name}"
    if ("data" in settings) == ("source" in settings):
        raise ValueError(
            f"{key}: give either data and context (held-out records of the run's own data) or source (a file of prompts), "
            f"not {'both' if 'data' in settings else 'neither'}"
        )
    kind, on_hub = (HeldOut, False) if "data" in settings else (Benchmark, is_hub(settings["source"]))
    known = [name for name in kind.__dataclass_fields__ if on_hub or name not in OF_HUB]
    for given in settings:
        if given not in known:
            what = "held-out records" if kind is HeldOut else "files of the hub" if on_hub else "a file"
            raise ValueError(f"{key}.{given}: unknown for a task of {what}; known: {', '.join(known)}")
    whole = {"new_tokens": new_tokens} | ({"revision": "main"} if on_hub else {}) | settings
    if kind is HeldOut:
        if "context" not in settings:
            raise ValueError(f"{key}.context: must be given: the shortest and the longest prompt in tokens, such as [64, 448]")
        shortest, longest = whole["context"]
        if shortest > longest:
            raise ValueError(f"{key}.context: [{shortest}, {longest}] is reversed; give the shortest prompt first")
        return HeldOut(**whole | {"context": (shortest, longest)})
    task = Benchmark(**whole)
    try:
        compose(to="prompt", template=task.template, optional=[])
    except RecordError as error:
        raise ValueError(f"{key}.{error.field}: {error.reason}") from error
    if on_hub:
        source = str(task.source)
        with faults_in(f"{key}.source"):
            parse_hub(source)
        if source.endswith(ARCHIVE) != bool(task.member):
            raise ValueError(f"{key}.member: {task.member!r}: names the file to read in an archive ({ARCHIVE}), and only there")
    return task


def check_room(name: str, task: Task, positions: int, layout: int = 0) -> int:
    """Return the most tokens of a task's prompt. positions: of the target; layout: tokens that the chat template adds.

    Raises ValueError, with the key, if no prompt and answer fit into the positions, or not the longest prompts asked for.
    """
    longest = positions - task.new_tokens - ROOM - layout
    if longest < 2:
        raise ValueError(
            f"evaluation.tasks.{name}.new_tokens: {task.new_tokens} leave no room for a prompt in the target's {positions} "
            "positions; lower it"
        )
    if isinstance(task, HeldOut) and task.context[1] > longest:
        raise ValueError(
            f"evaluation.tasks.{name}.context: prompts of {task.context[1]} tokens and what follows them do not fit the "
            f"target's {positions} positions; {longest} is the most"
        )
    return longest
