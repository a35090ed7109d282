"""Aligners: steps, chosen in the configuration, that bring the records of any schema into one of the known formats.

    align:
      - filter: {field: language, equals: en}
      - rename: {question: problem, answer: qwq}
      - add_id: {prefix: gsm8k}

They are taken in order; fields.py and lists.py say what each does. A record that a step cannot work on is rejected
with the field at fault. A field that is read may stand deeper: `meta.title`, `answers.0`. A null counts as missing.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from longspec.data.align import fields, lists
from longspec.data.align.fields import Many, Record, Step
from longspec.data.read.record_checks import RecordError

# Aligners whose settings are arguments of a function, which tells their types and defaults, or their aliases (`in`).
SETTINGS: dict[str, Callable[..., Any]] = {
    "add_id": fields.add_id,
    "compose": fields.compose,
    "filter": fields.keep_where,
    "flatten": lists.flatten,
    "alternate": lists.alternate,
    "lay_out": fields.lay_out,
    "read_tool_tags": lists.read_tool_tags,
    "start_at": lists.start_at,
}
MADE, FLATTENED, FILTERED = "records made", "lists flattened", "records filtered out"
# Aligners whose settings are names of the user's: a mapping, or a list.
MAPPINGS: dict[str, Callable[[dict[str, Any]], Step]] = {"rename": fields.rename, "set": fields.set_constants}
LISTS: dict[str, Callable[[list[str]], Step]] = {"select": fields.select, "drop": fields.drop}
KNOWN = (*MAPPINGS, *LISTS, *SETTINGS)


@dataclass(frozen=True)
class Aligner:
    """One step with the key that set it, such as align[2].rename, and what it did so far, in words for the manifest."""

    key: str
    step: Step
    tally: Counter[str] = field(default_factory=Counter)


def parse(name: str, steps: Any) -> list[Aligner]:
    """Return the steps of `data.<name>.align`. Raises ValueError with the key of what is unknown, missing or of a wrong type.

    Each call gives new steps, which number records from 0.
    """
    if not isinstance(steps, list):
        raise ValueError(f"data.{name}.align: must be a list such as [{{rename: {{question: problem}}}}], is {steps!r}")
    return [_aligner(f"data.{name}", f"align[{number}]", step) for number, step in enumerate(steps)]


def _aligner(dataset: str, place: str, step: Any) -> Aligner:
    known = f"known: {', '.join(KNOWN)}"
    if not isinstance(step, dict) or len(step) != 1:
        raise ValueError(f"{dataset}.{place}: must be one aligner with its settings, is {step!r}; {known}")
    [(name, settings)] = step.items()
    where = f"{dataset}.{place}.{name}"
    if name not in KNOWN:
        raise ValueError(f"{where}: no such aligner; {known}")
    try:
        json.dumps(settings, allow_nan=False)  # what the manifest keeps, and a record of JSON Lines can hold
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: must hold texts, finite numbers, true, false, null, lists and mappings: {error}") from error
    try:
        made = _step(name, settings, where)
    except RecordError as error:
        raise ValueError(f"{where}.{error.field}: {error.reason}") from error
    step, tally = made if isinstance(made, tuple) else (made, Counter())
    return Aligner(f"{place}.{name}", step, tally)


def _step(name: str, settings: Any, where: str) -> Step | tuple[Step, Counter[str]]:
    """The step; of one that says itself what it did its tally too."""
    if name in LISTS:
        if not isinstance(settings, list) or not settings or not all(isinstance(each, str) for each in settings):
            raise ValueError(f"{where}: must be a list of fields' names, is {settings!r}")
        return LISTS[name](settings)
    if not isinstance(settings, dict) or (name in MAPPINGS and not settings):
        raise ValueError(f"{where}: must be a mapping, is {settings!r}")
    if name in MAPPINGS:
        return MAPPINGS[name](settings)
    arguments = {str(key): value for key, value in settings.items()}
    try:
        return validate_call(config=ConfigDict(strict=True))(SETTINGS[name])(**arguments)
    except ValidationError as error:
        known = ", ".join(each.rstrip("_") for each in signature(SETTINGS[name]).parameters)
        faults = error.errors()
        key = str(faults[0]["loc"][0])
        why = " or ".join(fault["msg"] for fault in faults if fault["loc"][0] == key)
        value = f", is {arguments[key]!r}" if key in arguments else ""
        raise ValueError(f"{where}.{key}: {why}{value}; known: {known}") from error


def fields_read(steps: list[dict[str, Any]]) -> set[str]:
    """Return the fields of a source that parsed steps need or must not find; of a path such as `meta.title` `meta` too."""
    read: set[str] = set()
    for step in steps:
        [(name, settings)] = step.items()
        if name == "rename":
            read |= {*settings, *settings.values()}
        elif name == "select":
            read |= set(settings)
        elif name in SETTINGS:
            known = signature(SETTINGS[name]).parameters
            for key in known.keys() & {"field", "to"}:
                given = settings.get(key, known[key].default)
                read |= set(given if isinstance(given, list) else [given])
            read |= set(fields.units_of(settings["template"])) if name == "compose" else set()
    read.discard(None)
    return read | {field.split(".")[0] for field in read}


def apply(steps: list[Aligner], record: Record) -> Iterator[Record | RecordError | None]:
    """Yield all that the steps make of a record, one at a time: records, faults, None for one filtered out."""
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
