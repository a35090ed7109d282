"""Define a step, and the steps that work on a record's fields.

A step returns the record it makes (never changing the one it got), None when it filters the record out, or Many. It raises
RecordError with the field at fault. While a step is being built, RecordError names the setting at fault.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Annotated, Any

from pydantic import Field

from longspec.data.read.record_checks import RecordError, check_characters, kind, read_template_arguments, says_nothing

Record = dict[str, Any]


@dataclass(frozen=True)
class Many:
    """The records made of a list, which is named `field`; a RecordError where an element makes none."""

    field: str
    records: Iterator[Record | RecordError]


Step = Callable[[Record], Record | Many | None]


def found(record: Record, field: str) -> Any:
    """Return the value of a field, or at a path such as `meta.title` or `answers.0`; None where there is none."""
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def required(record: Record, field: str) -> Any:
    """Return the value of a field or path as `found` does. Raises RecordError where there is none."""
    value = found(record, field)
    if value is None:
        raise RecordError(field, "is missing or null")
    return value


def refuse_taken(record: Record, field: str) -> None:
    """Raise RecordError when a field that a step would make is there already."""
    if record.get(field) is not None:
        raise RecordError(field, "is there already; drop it first, or choose another name")


def rename(names: dict[str, Any]) -> Step:
    """{old: new}: give fields other names, all at once, so that two can change places."""
    for old, new in names.items():
        if not isinstance(old, str) or not isinstance(new, str) or not new:
            raise RecordError(str(old), f"must be a field's new name, is {new!r}")
        if list(names.values()).count(new) > 1:
            raise RecordError(old, f"another field becomes {new!r} too")

    def step(record: Record) -> Record:
        for old, new in names.items():
            if old not in record and found(record, old) is not None:
                raise RecordError(old, "stands inside another field; compose can copy it from there")
            required(record, old)
            if new not in names:
                refuse_taken(record, new)
        kept = {name: value for name, value in record.items() if name in names or name not in names.values()}
        return {names.get(name, name): value for name, value in kept.items()}

    return step


def select(names: list[str]) -> Step:
    """[name, ...]: keep these fields only."""

    def step(record: Record) -> Record:
        for name in names:
            if name not in record:
                raise RecordError(name, "is missing")
        return {name: record[name] for name in names}

    return step


def drop(names: list[str]) -> Step:
    """[name, ...]: leave these fields out; one that a record does not have is no fault."""
    return lambda record: {name: value for name, value in record.items() if name not in names}


def set_constants(values: dict[str, Any]) -> Step:
    """{name: value}: give fields constant values, whatever they were."""
    return lambda record: record | values


def add_id(prefix: str = "", field: str = "id", by: str = "number") -> Step:
    """Name each record `<prefix>-<number>` by a running number from 0, or `<prefix>-<hash>` by its content (`by: hash`)."""
    if by not in ("number", "hash"):
        raise RecordError("by", f"must be number or hash, is {by!r}")
    count = 0

    def step(record: Record) -> Record:
        nonlocal count
        refuse_taken(record, field)
        if by == "hash":
            label = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:16]
        else:
            label, count = str(count), count + 1
        return record | {field: f"{prefix}-{label}" if prefix else label}

    return step


def lay_out(chat_template_kwargs: dict[str, Any] | None = None, train_thoughts: bool | None = None) -> Step:
    """Arguments of the chat template in place of a record's own, and whether thoughts are trained or only read."""
    given: Record = {"chat_template_kwargs": read_template_arguments(chat_template_kwargs)} if chat_template_kwargs else {}
    given |= {} if train_thoughts is None else {"train_thoughts": train_thoughts}
    if not given:
        raise RecordError("train_thoughts", "is not given, nor is chat_template_kwargs; give one of them")
    return lambda record: record | given


def compose(to: str, template: str, optional: list[Any] | None = None) -> Step:
    """A text from a template of named units, such as "{title}\\n\\n{body}"; a brace that is text is written twice.

    A unit is a text or a number. A missing or empty one is a fault, unless it is `optional`: then the white space before it
    goes with it.
    """
    parts, units, optional = _parts(template), set(units_of(template)), optional or []
    for name in optional:
        if name not in units:
            raise RecordError("optional", f"{name!r} is no unit of the template; its units: {', '.join(sorted(units))}")

    def step(record: Record) -> Record:
        text = ""
        for literal, unit in parts:
            value = "" if unit is None else _unit(record, unit, unit in optional)
            text += (literal if value or unit is None else literal.rstrip()) + value
        return record | {to: text}

    return step


def units_of(template: str) -> list[str]:
    """Return the fields that a template asks for, each once. Raises ValueError for a template that is none."""
    return list(dict.fromkeys(unit for _, unit in _parts(template) if unit is not None))


def _parts(template: str) -> list[tuple[str, str | None]]:
    """The template as pairs of a literal and the unit behind it."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise RecordError("template", f"{error}; a brace that is text is written twice") from error
    if any(unit == "" or form or conversion for _, unit, form, conversion in parts):
        raise RecordError("template", "each unit is a field's name in braces, nothing more: {title}")
    if all(unit is None for _, unit, _, _ in parts):
        raise RecordError("template", "names no unit; `set` gives a field a constant")
    return [(literal, unit) for literal, unit, _, _ in parts]


def _unit(record: Record, name: str, optional: bool) -> str:
    value = found(record, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if optional and value in (None, ""):
        return ""
    text = check_characters(value, name)
    if not optional and says_nothing(text):
        raise RecordError(name, "is empty")
    return text


def keep_where(
    field: str,
    present: bool | None = None,
    equals: str | int | float | bool | None = None,
    in_: Annotated[list[Any] | None, Field(alias="in")] = None,
    not_in: list[Any] | None = None,
    min: int | float | None = None,
    max: int | float | None = None,
    min_characters: int | None = None,
    max_characters: int | None = None,
) -> Step:
    """Keep the records whose field meets all conditions; the others are filtered out, and counted.

    equals, in, not_in: the value; min, max: of a number; min_characters, max_characters: of a text; present: whether it is
    there, neither null nor empty. A record without the field, or of the wrong type, is a fault unless `present` is asked.
    """
    limits = {"equals": equals, "in": in_, "not_in": not_in, "min": min, "max": max}
    limits |= {"min_characters": min_characters, "max_characters": max_characters}
    conditions = {name: limit for name, limit in limits.items() if limit is not None}
    if (present is not None) == bool(conditions):
        raise RecordError("field", "needs a condition; `present` stands alone")

    def step(record: Record) -> Record | None:
        if present is not None:
            return record if (found(record, field) not in (None, "", [], {})) == present else None
        value = required(record, field)
        return record if all(_meets(value, field, name, limit) for name, limit in conditions.items()) else None

    return step


def _meets(value: Any, field: str, condition: str, limit: Any) -> bool:
    if condition == "equals":
        return bool(value == limit)
    if condition in ("in", "not_in"):
        return (value in limit) == (condition == "in")
    if condition.endswith("_characters"):
        value = len(check_characters(value, field))
    elif not isinstance(value, int | float) or isinstance(value, bool):
        raise RecordError(field, f"must be a number, is {kind(value)}")
    return bool(value >= limit if condition.startswith("min") else value <= limit)
