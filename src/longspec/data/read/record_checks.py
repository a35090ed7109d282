"""Checks of a record's values: texts, thoughts, tools and their calls. RecordError names the field that fits no format.

Calls and tools come as OpenAI writes them, `{type: function, function: {name, ...}}`, or as the function alone. Any of these,
and the arguments of a call, may be JSON text.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from longspec import jsonl
from longspec.shown import DRAWN_AS_NOTHING

UNANSWERED_FIX = "; the target answers questions where data.<name>.regenerate is set"
_SEEN = re.compile(rf"[^\s{DRAWN_AS_NOTHING}]")  # any other character


class RecordError(ValueError):
    """Say that a record fits no format: `field` names the place, `reason` the fault."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def kind(value: Any) -> str:
    """Return the type of a JSON value, for a message."""
    return "null" if value is None else type(value).__name__


def check_characters(value: Any, field: str) -> str:
    """Return the value if it is text without NUL characters and lone surrogates. Raises RecordError if it is not."""
    if not isinstance(value, str):
        raise RecordError(field, "is missing or null" if value is None else f"must be text, is {kind(value)}")
    if "\0" in value:
        raise RecordError(field, f"holds a NUL character at character {value.index(chr(0)) + 1}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(field, f"holds a lone surrogate at character {error.start + 1}") from error
    return value


def check_text(value: Any, field: str) -> str:
    """Return the value as check_characters does. Raises RecordError also if it is empty or has no visible character."""
    if says_nothing(check_characters(value, field)):
        raise RecordError(field, "is empty")
    return value


def says_nothing(text: str) -> bool:
    """Tell whether a text holds only white space and characters that are drawn as nothing, such as U+200B."""
    return _SEEN.search(text) is None


def check_nested(value: Any, field: str) -> None:
    """Raise RecordError if a text within lists and mappings holds a lone surrogate."""
    check_characters(json.dumps(value, ensure_ascii=False), field)


@dataclass(frozen=True)
class Marks:
    """Hold what opens and closes a thought. form: how the model writes both, around {thought} and before {said}."""

    opener: str
    closer: str
    form: str

    def written(self, thought: str, said: str) -> str:
        """Return a content that begins with a thought."""
        return self.form.format(thought=thought, said=said)


THINK = Marks("<think>", "</think>", "<think>\n{thought}\n</think>\n\n{said}")
MARKS = (THINK, Marks("[THINK]", "[/THINK]", "[THINK]{thought}[/THINK]{said}"))  # the second: Magistral's


def opened_at_end(prompt: str) -> Marks | None:
    """Return the marks of a thought that a prompt leaves open at its very end; None if it opens none."""
    return next((marks for marks in MARKS if prompt.rstrip().endswith(marks.opener)), None)


def opened_at_start(content: str) -> Marks | None:
    """Return the marks of the thought that begins a content; None if none does."""
    return next((marks for marks in MARKS if content.lstrip().startswith(marks.opener)), None)


def closes_one(content: str) -> bool:
    """Tell whether a thought ends somewhere in a content."""
    return any(marks.closer in content for marks in MARKS)


def thought_apart(content: str) -> tuple[str, str] | None:
    """Return the thought that begins a content, and what is said behind it; None if no whole thought begins it.

    The opening mark may be missing, since many prompts end with it.
    """
    opened = opened_at_start(content)
    for marks in [opened] if opened else MARKS:
        thought, closer, said = content.partition(marks.closer)
        if closer and (opened or marks.opener not in thought):
            return thought.lstrip().removeprefix(marks.opener).strip("\n"), said.lstrip("\n")
    return None


def stated(holder: dict[str, Any], name: str) -> Any:
    """Return a field's value; None also for empty JSON text, which columns of text have if other rows say something."""
    value = holder.get(name)
    return None if isinstance(value, str) and value.strip() in ("[]", "{}", "null") else value


def parsed(value: Any, field: str) -> Any:
    """Return the value; if it is JSON text, what the text holds."""
    if not isinstance(value, str):
        return value
    check_characters(value, field)
    try:
        return jsonl.decode(value)
    except ValueError as error:
        raise RecordError(field, f"is text, but no JSON: {error}") from error


def _functions(value: Any, field: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return for each element its place, the element itself, and its function, whose name is checked."""
    value = parsed(value, field)
    elements = [value] if isinstance(value, dict) else value
    if not isinstance(elements, list) or not elements:
        raise RecordError(field, f"must be a list of functions that is not empty, is {kind(value)}")
    found = []
    for number, element in enumerate(elements):
        place = f"{field}[{number}]"
        function = element.get("function", element) if isinstance(element, dict) else None
        if not isinstance(function, dict):
            raise RecordError(place, "must be an object with a function")
        check_text(function.get("name"), f"{place}.name")
        check_nested(function, place)
        found.append((place, element, function))
    return found


def read_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return the calls of one message, their arguments as objects. Raises RecordError with the field at fault."""
    calls = []
    for place, element, function in _functions(value, field):
        given = function.get("arguments")
        arguments = {} if given in (None, "") else parsed(given, f"{place}.arguments")
        if not isinstance(arguments, dict):
            raise RecordError(f"{place}.arguments", f"must be an object or one as JSON text, is {kind(arguments)}")
        check_nested(arguments, f"{place}.arguments")
        call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        name = element.get("id")
        calls.append(call if name is None else {"id": check_text(name, f"{place}.id")} | call)
    return calls


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return a record's `tools` as OpenAI writes them; None if there are none. Raises RecordError as read_calls does."""
    value = parsed(value, "tools") if value else None
    return [{"type": "function", "function": function} for _, _, function in _functions(value, "tools")] if value else None


def read_template_arguments(value: Any) -> dict[str, Any]:
    """Return what a record or dataset gives the chat template, such as `enable_thinking`. Raises RecordError if it is none."""
    field = "chat_template_kwargs"
    value = {} if value is None else parsed(value, field)
    if not isinstance(value, dict):
        raise RecordError(field, f"must be an object such as {{enable_thinking: false}}, is {kind(value)}")
    check_nested(value, field)
    return value
