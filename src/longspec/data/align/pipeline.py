"""Aligners: steps, chosen in the configuration, that bring records of any schema into one of the known formats.

    align:
      - filter: {field: language, equals: en}
      - rename: {question: problem, answer: qwq}
      - select: [problem, qwq]

The steps run in this order; fields.py says what each does. A record that a step cannot work on is rejected
with the field at fault. A field that is read may lie deeper: `meta.title`, `answers.0`. A null counts as missing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from longspec.data.align import fields
from longspec.data.align.fields import Many, Record, Step
from longspec.data.read.record_checks import RecordError

# The settings are the arguments of these functions, with their types and defaults, or their aliases (`in`).
KNOWN: dict[str, Callable[..., Step]] = {
    "rename": fields.rename,
    "set": fields.set_constants,
    "select": fields.select,
    "drop": fields.drop,
    "compose": fields.compose,
    "filter": fields.keep_where,
    "flatten": fields.flatten,
    "start_at": fields.start_at,
}
OF_NAMES = ("rename", "set", "select", "drop")  # steps with one argument: settings whose names the user chooses
MADE, FLATTENED, FILTERED = "records made", "lists flattened", "records filtered out"


@dataclass(frozen=True)
class Aligner:
    """Hold one step, the key that set it, such as align[2].rename, and counts of what it did, in words for the manifest."""

    key: str
    step: Step
    tally: Counter[str] = field(default_factory=Counter)


def parse(name: str, steps: list[dict[str, Any]]) -> list[Aligner]:
    """Return the steps of `data.<name>.align`. Raises ValueError, with the key, for what is unknown, missing or mistyped.

    steps: mappings from one aligner to its settings, which JSON can hold, as the schema of workflow.yaml has them.
    """
    aligners = []
    for number, step in enumerate(steps):
        [(aligner, settings)] = step.items()
        key = f"align[{number}].{aligner}"
        where = f"data.{name}.{key}"
        if aligner not in KNOWN:
            raise ValueError(f"{where}: no such aligner; known: {', '.join(KNOWN)}")
        try:
            aligners.append(Aligner(key, _step(aligner, settings, where)))
        except RecordError as error:
            raise ValueError(f"{where}.{error.field}: {error.reason}") from error
    return aligners


def _step(name: str, settings: Any, where: str) -> Step:
    of_names, known = name in OF_NAMES, [each.rstrip("_") for each in signature(KNOWN[name]).parameters]
    arguments = dict.fromkeys(known, settings) if of_names else settings
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: must be a mapping, is {settings!r}; known: {', '.join(known)}")
    try:
        return validate_call(config=ConfigDict(strict=True))(KNOWN[name])(**{str(key): arguments[key] for key in arguments})
    except ValidationError as error:
        [fault, *_] = error.errors()
        if of_names:
            raise ValueError(
                f"{'.'.join([where, *map(str, fault['loc'][1:])])}: {fault['msg']}, is {fault['input']!r}"
            ) from error
        key = str(fault["loc"][0])
        raise ValueError(f"{where}.{key}: {fault['msg']}, is {arguments.get(key)!r}; known: {', '.join(known)}") from error


def apply(steps: list[Aligner], record: Record) -> Iterator[Record | RecordError | None]:
    """Yield what the steps make of a record, one at a time: records, faults, None for each one that is filtered out."""
    if not steps:
        yield record
        return
    aligner, rest = steps[0], steps[1:]
    try:
        made = aligner.step(record)
    except RecordError as error:
        yield error
        return
    if made is None:
        aligner.tally[FILTERED] += 1
        yield None
    elif not isinstance(made, Many):
        yield from apply(rest, made)
    else:
        aligner.tally[FLATTENED] += 1
        for place, child in enumerate(made.records):
            aligner.tally[MADE] += 1
            for outcome in [child] if isinstance(child, RecordError) else apply(rest, child):
                if isinstance(outcome, RecordError):
                    outcome = RecordError(outcome.field, f"{outcome.reason} (in {made.field}[{place}])")
                yield outcome
