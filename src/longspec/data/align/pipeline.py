"""Aligners: steps, chosen in the configuration, that bring the records of any schema into one of the known formats.

    align:
      - filter: {field: language, equals: en}
      - rename: {question: problem, answer: qwq}
      - add_id: {prefix: gsm8k}

They are taken in order; fields.py and lists.py say what each does. A record that a step cannot work on is rejected
with the field at fault. A field that is read may stand deeper: `meta.title`, `answers.0`. A null counts as missing.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from longspec.data.align import fields, lists
from longspec.data.align.align_base import Many, Record, Step, Tally
from longspec.data.read.record_checks import RecordError

# Aligners whose settings are arguments of a function, which tells their types and defaults; `in_` is written `in`.
SETTINGS: dict[str, Callable[..., Step]] = {
    "add_id": fields.add_id,
    "compose": fields.compose,
    "filter": fields.keep_where,
    "flatten": lists.flatten,
    "alternate": lists.alternate,
    "lay_out": fields.lay_out,
    "read_tool_tags": lists.read_tool_tags,
    "start_at": lists.start_at,
}
TALLIED = ("start_at",)  # say themselves what they did
MADE, FLATTENED, FILTERED = "records made", "lists flattened", "records filtered out"
# Aligners whose settings are names of the user's: a mapping, or a list.
MAPPINGS: dict[str, Callable[[dict[str, Any]], Step]] = {"rename": fields.rename, "set": fields.set_constants}
LISTS: dict[str, Callable[[list[str]], Step]] = {"select": fields.select, "drop": fields.drop}
KNOWN = (*MAPPINGS, *LISTS, *SETTINGS)


@dataclass(frozen=True)
class Aligner:
    """One step with the key that set it, such as align[2].rename, and what it did so far."""

    key: str
    step: Step
    tally: Tally = field(default_factory=Tally)


def parse(name: str, steps: Any) -> list[Aligner]:
    """The steps of `data.<name>.align`. Raises ValueError with the key of what is unknown, missing or of a wrong type.

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
    tally = Tally()
    try:
        return Aligner(f"{place}.{name}", _step(name, settings, where, tally), tally)
    except RecordError as error:
        raise ValueError(f"{where}.{error.field}: {error.reason}") from error


def _step(name: str, settings: Any, where: str, tally: Tally) -> Step:
    if name in LISTS:
        if not isinstance(settings, list) or not settings or not all(isinstance(each, str) for each in settings):
            raise ValueError(f"{where}: must be a list of fields' names, is {settings!r}")
        return LISTS[name](settings)
    if not isinstance(settings, dict) or (name in MAPPINGS and not settings):
        raise ValueError(f"{where}: must be a mapping, is {settings!r}")
    if name in MAPPINGS:
        return MAPPINGS[name](settings)
    arguments = _checked(name, settings, where)
    return SETTINGS[name](**arguments, tally=tally) if name in TALLIED else SETTINGS[name](**arguments)


def settings_of(name: str) -> dict[str, Parameter]:
    """The settings of an aligner, each with its type and default."""
    return {each.rstrip("_"): found for each, found in signature(SETTINGS[name]).parameters.items() if each != "tally"}


def _checked(name: str, settings: dict[str, Any], where: str) -> dict[str, Any]:
    known = settings_of(name)
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown; known: {', '.join(known)}")
        told = known[key].annotation
        kinds = tuple(get_origin(kind) or kind for kind in (get_args(told) if isinstance(told, UnionType) else [told]))
        kinds = tuple(kind for kind in kinds if kind is not NoneType)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{where}.{key}: must be {' or '.join(kind.__name__ for kind in kinds)}, is {value!r}")
    for key, setting in known.items():
        if key not in settings and setting.default is Parameter.empty:
            raise ValueError(f"{where}.{key}: must be given; known: {', '.join(known)}")
    return {known[key].name: value for key, value in settings.items()}


def fields_read(steps: list[dict[str, Any]]) -> set[str]:
    """The fields of a source that parsed steps need or must not find; of a path such as `meta.title` `meta` too."""
    read: set[str] = set()
    for step in steps:
        [(name, settings)] = step.items()
        if name == "rename":
            read |= {*settings, *settings.values()}
        elif name == "select":
            read |= set(settings)
        elif name in SETTINGS:
            known = settings_of(name)
            given = [settings.get(key, known[key].default) for key in ("field", "to") if key in known]
            read |= {field for value in given for field in (value if isinstance(value, list) else [value]) if field}
            read |= set(fields.units_of(settings["template"])) if name == "compose" else set()
    return read | {field.split(".")[0] for field in read}


def apply(steps: list[Aligner], record: Record, first: int = 0) -> Iterator[Record | RecordError | None]:
    """All that the steps from `first` on make of a record, one at a time: records, faults, None for one filtered out."""
    for number in range(first, len(steps)):
        aligner = steps[number]
        try:
            made = aligner.step(record)
        except RecordError as error:
            yield error
            return
        if made is None:
            aligner.tally[FILTERED] += 1
            yield None
            return
        if isinstance(made, Many):
            yield from _each(steps, made, number)
            return
        record = made
    yield record


def _each(steps: list[Aligner], many: Many, number: int) -> Iterator[Record | RecordError | None]:
    """Applies the steps behind a flatten step to each of its records; a fault says which element it is in."""
    tally = steps[number].tally
    tally[FLATTENED] += 1
    for place, child in enumerate(many.records):
        tally[MADE] += 1
        for outcome in [child] if isinstance(child, RecordError) else apply(steps, child, number + 1):
            if isinstance(outcome, RecordError):
                outcome = RecordError(outcome.field, f"{outcome.reason} (in {many.field}[{place}])")
            yield outcome
