"""Share among the verbs their options, their last words, and text that is safe to print at a terminal.

Text from data and file names may move the cursor or hold what nobody sees. Control characters become their pictures (␛, ␊),
invisible characters and marks of writing direction their numbers (<U+202E>). All other text stays as it is.
"""

import errno
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
CORRECT = "correct the path, or let this user read and write there, and run it again"
BRIEF = 300  # characters, where the beginning of a text will do
# Unicode's "default ignorable" characters, which are drawn as nothing, for a character class of a regular expression.
# Variation selectors are apart: emoji of everyday text end with one.
_ZERO_WIDTH = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
DRAWN_AS_NOTHING = _ZERO_WIDTH + "\ufe00-\ufe0f"
# Besides these: C0 and C1 controls, Unicode's own line ends, annotation marks, and surrogates, which no encoding can write.
_SIGNS = re.compile(f"[\0-\x1f\x7f-\x9f\u2028\u2029\ufff9-\ufffb\ud800-\udfff{_ZERO_WIDTH}]")


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


def one_line(text: object) -> str:
    """Return the text with control and invisible characters replaced, so that it stays on one line."""
    return _SIGNS.sub(_sign, str(text))


def brief(text: object) -> str:
    """Return the beginning of a text that may be long, such as a library's error, on one line."""
    return one_line(" ".join(str(text).split())[:BRIEF])


def lines(text: str) -> str:
    """Return the text with its line ends, each line as one_line returns it."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def duration(seconds: float | None) -> str:
    """Return a time span in its two largest units at most, such as "3 h 05 min"; "-" for None."""
    if seconds is None:
        return "-"
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class ManyLinesError(ValueError):
    """Report a user's mistake in several lines, one per argument."""

    def __str__(self) -> str:
        return "\n".join(self.args)


def error(fault: Exception) -> str:
    """Return the last words of a verb that a user's mistake ended: one line, or the lines of a ManyLinesError."""
    told = fault.args if isinstance(fault, ManyLinesError) else [fault]
    return "error: " + "\n".join(one_line(line) for line in told)


def of_disk(fault: Exception) -> str:
    """Return a line for a full disk or a place that may not be written; empty for any other fault."""
    code = getattr(fault, "errno", None)
    # safetensors and torch raise errors of their own for a full disk.
    if code in FULL or any(os.strerror(each) in str(fault) for each in FULL):
        return f"error: {brief(fault)}; free some space there, and run it again"
    return f"error: {brief(fault)}; {CORRECT}" if code in CLOSED else ""


@contextmanager
def ending_for_mistakes() -> Iterator[None]:
    """End the process with the words of `error` for a ValueError of the block, or in one line for an OSError or a full disk.

    Any other exception passes, as a fault of ours.
    """
    try:
        yield
    except ValueError as fault:
        sys.exit(error(fault))
    except Exception as fault:
        told = of_disk(fault)
        if not told and not isinstance(fault, OSError):
            raise
        sys.exit(told or f"error: {brief(fault)}; {CORRECT}")


def run_verb(room: str, verbs: Collection[str], usage: str | None) -> NoReturn:
    """Run the verb that the command line names. Each verb is a module: a gate or a login node imports no torch."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb in verbs:
        sys.exit(import_module(f"longspec.{room}.{verb}").main(sys.argv[2:]))
    is_asked = verb in ("-h", "--help")
    print(usage, file=sys.stdout if is_asked else sys.stderr)
    sys.exit(0 if is_asked else 2)


def add_verb(verbs: Any, name: str, purpose: str, **defaults: Any) -> ArgumentParser:
    """Add a verb to `verbs` (add_subparsers). Its purpose stands in their list and in its own --help."""
    parser: ArgumentParser = verbs.add_parser(name, help=purpose, description=purpose)
    parser.set_defaults(**defaults)
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number, `least` or more."""

    def whole(text: str) -> int:
        if int(text) < least:
            raise ArgumentTypeError(f"must be {least} or more, is {text}")
        return int(text)

    return whole


def named_path(text: str) -> tuple[str, Path]:
    """Return NAME=PATH as a pair. Raises argparse's error for text of another form."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)
