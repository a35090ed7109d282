"""Define a step, and the steps that aligners are made of.

A step returns the record it makes (never changing the one it got), None when it filters the record out, or Many. It raises
RecordError with the field at fault. While a step is being built, RecordError names the setting at fault.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Annotated, Any

from pydantic import Field

from longspec.data.read.record_checks import RecordError, check_characters, kind, parsed, says_nothing
from longspec.data.read.records import role_of

Record = dict[str, Any]


@dataclass(frozen=True)
class Many:
    """Hold the records made of a list, the field `field`; a RecordError stands for an element that makes none."""

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


def rename(names: dict[str, str]) -> Step:
    """Give fields other names, {old: new}, all at once, so that two can change places."""
    for old, new in names.items():
        if list(names.values()).count(new) > 1:
            raise RecordError(old, f"another field becomes {new!r} too")

    def step(record: Record) -> Record:
        for old, new in names.items():
            if record.get(old) is None:
                raise RecordError(old, "is missing or null")
            if new not in names and record.get(new) is not None:
                raise RecordError(new, "is there already; drop it first, or choose another name")
        kept = {name: value for name, value in record.items() if name in names or name not in names.values()}
        return {names.get(name, name): value for name, value in kept.items()}

    return step


def select(names: list[str]) -> Step:
    """Keep these fields only."""

    def step(record: Record) -> Record:
        for name in names:
            if name not in record:
                raise RecordError(name, "is missing")
        return {name: record[name] for name in names}

    return step


def drop(names: list[str]) -> Step:
    """Leave these fields out; one that a record does not have is no fault."""
    return lambda record: {name: value for name, value in record.items() if name not in names}


def set_constants(values: dict[str, Any]) -> Step:
    """Give fields constant values, whatever they were."""
    return lambda record: record | values


def compose(to: str, template: str, optional: list[Any] | None = None) -> Step:
    """Write a text from a template of named units into `to`, such as "{title}\\n\\n{body}"; write a brace that is text twice.

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
    """Return the fields that a template asks for, each once. Raises RecordError for a template that is none."""
    return list(dict.fromkeys(unit for _, unit in _parts(template) if unit is not None))


def _parts(template: str) -> list[tuple[str, str | None]]:
    """Return the template as pairs of a literal and the unit behind it; the last unit may be None."""
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
    there, neither null nor empty. Unless `present` is given, a field that is missing or of the wrong type is a fault.
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


def _required_list(record: Record, field: str) -> list[Any]:
    value = parsed(required(record, field), field)  # Parquet may hold lists as JSON text
    if not isinstance(value, list):
        raise RecordError(field, f"must be a list, is {kind(value)}")
    if not value:
        raise RecordError(field, "is an empty list")
    return value


def flatten(field: str, merge: bool = False) -> Step:
    """Make one record of each element of a list; each keeps the record's other fields.

    The element stands in the field itself; with `merge` it is an object whose fields join the record's.
    """

    def step(record: Record) -> Many:
        elements = _required_list(record, field)
        rest = {name: value for name, value in record.items() if name != field}
        return Many(field, (_merged(rest, element) if merge else rest | {field: element} for element in elements))

    return step


def _merged(rest: Record, element: Any) -> Record | RecordError:
    if not isinstance(element, dict):
        return RecordError("element", f"must be an object to be merged, is {kind(element)}")
    both = rest.keys() & element.keys()
    return RecordError(min(both), "stands in the record and in the element") if both else rest | element


def start_at(field: str) -> Step:
    """Leave out what a conversation says before its first question; system messages stay."""

    def step(record: Record) -> Record:
        turns = _required_list(record, field)
        roles = [role_of(turn, f"{field}[{number}]")[0] for number, turn in enumerate(turns)]
        if "user" not in roles:
            raise RecordError(field, "has no user message to start at")
        first = roles.index("user")
        system = [turn for turn, role in zip(turns[:first], roles[:first], strict=True) if role == "system"]
        return record | {field: system + turns[first:]}

    return step
