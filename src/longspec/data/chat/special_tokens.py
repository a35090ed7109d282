"""Names of special tokens: those that somebody typed are text, those that a chat template writes are tokens."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from longspec.data.read.record_checks import MARKS

# Tokens that a reasoning model itself writes in its answers, even if its tokenizer counts them as special tokens.
REASONING = tuple(mark for marks in MARKS for mark in (marks.opener, marks.closer))


class LayoutError(ValueError):
    """Say that the chat template does not lay a conversation out, or not so that its answers can be located."""


def special_names(tokenizer: Any) -> tuple[str, ...]:
    """Return the names of all control tokens, also those without a named role (bos, eos, ...)."""
    added = tokenizer.added_tokens_decoder.values()
    return tuple(sorted({token.content for token in added if token.special} | set(tokenizer.all_special_tokens)))


@lru_cache(maxsize=8)
def pattern_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the first of some names in a text; where several begin, the longest."""
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))


def unused_characters(text: str) -> Iterator[str]:
    """Yield private-use characters that do not occur in `text`."""
    return (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of lists and mappings with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list) else value


def hide(messages: list[dict[str, Any]], special: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replace every special token's name in messages by a character that occurs nowhere else, as often as the name is long.

    Returns the messages, and the name that each such character stands for. A reasoning model's own marks in an answer's
    content stay.
    """
    if not special:
        return messages, {}
    unused = unused_characters(json.dumps(messages, ensure_ascii=False))
    characters: dict[str, str] = {}  # of each name

    def covered(text: str, own: tuple[str, ...] = ()) -> str:
        def cover(match: re.Match[str]) -> str:
            name = match[0]
            if name in own:
                return name
            if name not in characters:
                characters[name] = next(unused)
            return characters[name] * len(name)

        return pattern_of(special).sub(cover, text)

    hidden = []
    for message in messages:
        own = REASONING if message.get("role") == "assistant" else ()
        hidden.append(
            {
                key: covered(value, own) if key == "content" else value if key == "role" else _mapped(value, covered)
                for key, value in message.items()
            }
        )
    return hidden, {character: name for name, character in characters.items()}


@dataclass(frozen=True)
class Piece:
    """Hold a string to tokenize. literal: names of special tokens in it are text."""

    text: str
    literal: bool
    start: int = 0  # place of the piece in its document, in characters
    opens: bool = False  # begins a document, which the tokenizer may open with its own tokens (beginning of sequence)


@dataclass(frozen=True)
class Plan:
    """Hold a document cut into pieces, and the character ranges of its answers; None if all of it is one answer."""

    pieces: list[Piece]
    answers: list[tuple[int, int]] | None
    as_served: bool = True  # each answer follows the template's own request for it
    left_out: int = 0  # messages of the record that stand in none of its documents
    said: tuple[int, ...] | None = None  # the tokens of an answer that the target itself has written behind the text

    @property
    def text(self) -> str:
        """Return the whole document."""
        return "".join(piece.text for piece in self.pieces)


def pieces(text: str, names: dict[str, str]) -> list[Piece]:
    """Cut a laid-out text at its hidden names, each a literal piece. Raises LayoutError for a part of a name."""
    if not names:
        return [Piece(text, literal=False)]
    cut: list[Piece] = []
    place = 0
    for run in re.finditer("|".join(f"{character}+" for character in names), text):
        name = names[run[0][0]]
        if len(run[0]) % len(name):
            raise LayoutError("the chat template cuts a message inside the name of a special token")
        cut.append(Piece(text[place : run.start()], literal=False, start=place))
        cut += [Piece(name, literal=True, start=start) for start in range(run.start(), run.end(), len(name))]
        place = run.end()
    return [piece for piece in [*cut, Piece(text[place:], literal=False, start=place)] if piece.text]
