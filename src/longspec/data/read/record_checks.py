"""Checks of a record's values, and the fault that names the field at which a record fits no format."""

import re
from typing import Any

from longspec.shown import DRAWN_AS_NOTHING

UNANSWERED_FIX = "; the target answers questions where data.<name>.regenerate is set"
_SEEN = re.compile(rf"[^\s{DRAWN_AS_NOTHING}]")  # any other character


class RecordError(ValueError):
    """A record that fits no format: `field` names the place, `reason` the fault."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def kind(value: Any) -> str:
    """The type of a JSON value, for a message."""
    return "null" if value is None else type(value).__name__


def check_characters(value: Any, field: str) -> str:
    """The value when it is text without NUL characters and lone surrogates. Raises RecordError when it is not."""
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
    """The value as of check_characters. Raises RecordError also when it is empty or has no visible character."""
    if says_nothing(check_characters(value, field)):
        codes = sorted({ord(character) for character in value if not character.isspace()})
        why = f": it holds nothing but characters that are not seen, such as U+{codes[0]:04X}" if codes else ""
        raise RecordError(field, f"is empty{why}")
    return value


def says_nothing(text: str) -> bool:
    """Whether a text holds nothing but white space and characters that are drawn as nothing, such as U+200B."""
    return _SEEN.search(text) is None


def check_nested(value: Any, field: str) -> None:
    """Raises RecordError for a text within lists and mappings that `check_characters` refuses."""
    if isinstance(value, str):
        check_characters(value, field)
    elif isinstance(value, dict):
        for key, part in value.items():
            check_characters(key, f"{field}, a key")
            check_nested(part, f"{field}.{key}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            check_nested(part, f"{field}[{number}]")
