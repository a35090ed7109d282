"""Aligners that work on lists: of records, of texts, of messages."""

import re
from collections import Counter
from typing import Any

from longspec.data.align.fields import Many, Record, Step, refuse_taken, required
from longspec.data.read.record_checks import RecordError, check_characters, kind, read_calls
from longspec.data.read.records import ROLES, role_of

STARTS = ("assistant", "system", "user")  # roles that a conversation may be made to start at


def _required_list(record: Record, field: str) -> list[Any]:
    value = required(record, field)
    if not isinstance(value, list):
        raise RecordError(field, f"must be a list, is {kind(value)}")
    if not value:
        raise RecordError(field, "is an empty list")
    return value


def flatten(field: str | list[Any], to: str | None = None, merge: bool = False) -> Step:
    """A list becomes one record per element; the other fields are kept in each.

    The element stands in the field itself, or in `to`; with `merge` it is an object whose fields join the record's.
    Several fields (a list of names) are taken side by side; their lists must be of one length.
    """
    fields = [field] if isinstance(field, str) else field
    if not fields or not all(isinstance(name, str) for name in fields):
        raise RecordError("field", f"must be a field's name or a list of names, is {field!r}")
    if (len(fields) > 1) + (to is not None) + merge > 1:
        raise RecordError("field", "several fields, `to` and `merge` exclude each other")

    def step(record: Record) -> Many:
        lists = [_required_list(record, name) for name in fields]
        for name, values in zip(fields, lists, strict=True):
            if len(values) != len(lists[0]):
                raise RecordError(name, f"has {len(values)} elements, {fields[0]} has {len(lists[0])}")
        rest = {name: value for name, value in record.items() if name not in fields}
        if merge:
            return Many(fields[0], (_merged(rest, element) for element in lists[0]))
        if to is not None:
            refuse_taken(rest, to)
        names = fields if to is None else [to]
        return Many(fields[0], (rest | dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)))

    return step


def _merged(rest: Record, element: Any) -> Record | RecordError:
    if not isinstance(element, dict):
        return RecordError("element", f"must be an object to be merged, is {kind(element)}")
    both = rest.keys() & element.keys()
    return RecordError(min(both), "stands in the record and in the element") if both else rest | element


def alternate(field: str, to: str = "messages", roles: list[Any] | None = None) -> Step:
    """A list of texts, spoken by the roles in turn, becomes a conversation (UltraChat's `data`)."""
    roles = ["user", "assistant"] if roles is None else roles
    if not roles or not all(role in ROLES for role in roles):
        raise RecordError("roles", f"must be roles such as [user, assistant], is {roles!r}; known: {', '.join(ROLES)}")

    def step(record: Record) -> Record:
        texts = _required_list(record, field)
        rest = {name: value for name, value in record.items() if name != field}
        refuse_taken(rest, to)
        return rest | {to: [{"role": roles[n % len(roles)], "content": text} for n, text in enumerate(texts)]}

    return step


def start_at(field: str, role: str = "user") -> tuple[Step, Counter[str]]:
    """Leave out what a conversation says before the first message of a role; system messages stay. Counts what it left out."""
    tally: Counter[str] = Counter()
    if role not in STARTS:
        raise RecordError("role", f"must be one of {', '.join(STARTS)}, is {role!r}")

    def step(record: Record) -> Record:
        turns = _required_list(record, field)
        roles = [role_of(turn, f"{field}[{number}]")[0] for number, turn in enumerate(turns)]
        if role not in roles:
            raise RecordError(field, f"has no {role} message to start at")
        first = roles.index(role)
        system = [turn for turn, who in zip(turns[:first], roles[:first], strict=True) if who == "system"]
        if len(system) < first:
            tally["conversations begun later"] += 1
            tally["messages left out"] += first - len(system)
        return record | {field: system + turns[first:]}

    return step, tally


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_TAG = re.compile(r"</?tool_(?:call|response)>")


def read_tool_tags(field: str) -> Step:
    """Calls between <tool_call> tags become `tool_calls` of their message, each <tool_response> a message of its own.

    Each call is JSON with `name` and `arguments`. A tag that is not closed, or a text between results, is a fault.
    """

    def step(record: Record) -> Record:
        turns = _required_list(record, field)
        return record | {field: [made for number, turn in enumerate(turns) for made in _messages(turn, f"{field}[{number}]")]}

    return step


def _messages(turn: Any, place: str) -> list[Any]:
    """A message without tags; several for one that holds several results."""
    role, what = role_of(turn, place)
    if role not in ("assistant", "tool") or not isinstance(turn.get(what), str):
        return [turn]
    content = check_characters(turn[what], f"{place}.{what}")
    pattern = _CALL if role == "assistant" else _RESULT
    inner, rest = pattern.findall(content), pattern.sub("", content)
    if not inner and not _TAG.search(rest):
        return [turn]
    if _TAG.search(rest) or (role == "tool" and rest.strip()):
        raise RecordError(f"{place}.{what}", "holds a tag of tools that is not closed, or text beside what tools returned")
    if role == "tool":
        return [turn | {what: each.strip()} for each in inner]
    calls = [call for each in inner for call in read_calls(each.strip(), f"{place}.{what}")]
    return [turn | {what: rest.strip(), "tool_calls": calls}]
