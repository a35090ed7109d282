"""Pieces of command lines that several verbs share. Needs no other module."""

from argparse import ArgumentParser, ArgumentTypeError, HelpFormatter
from functools import partial
from pathlib import Path
from typing import Any

# An option's help stands beside it, not below, up to this column: for verbs whose --help would not fit a screen.
WIDE = partial(HelpFormatter, max_help_position=36)


def add_verb(verbs: Any, name: str, purpose: str, **defaults: Any) -> ArgumentParser:
    """Add a verb to `verbs` (add_subparsers); its purpose stands in their list and at the head of its own --help."""
    parser: ArgumentParser = verbs.add_parser(name, help=purpose, description=purpose)
    parser.set_defaults(**defaults)
    return parser


def named_path(text: str) -> tuple[str, Path]:
    """NAME=PATH as a pair. Raises argparse's error for text of another form."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)
