"""A long text tokenized window by window: memory follows a window's size, not the text's, and the tokens are the whole's.

A tokenizer's own bookkeeping takes some 180 bytes for each of the text. What a token is hangs on its neighbourhood alone, but
where that ends no tokenizer tells. So windows overlap, and what two of them make of the stretch they share is compared: the
next one takes over only where both have cut it into the same tokens. The tokens near a window's end, which what follows may
change, are of no account.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 20  # characters; a longer text is cut
UNSURE = 512  # tokens at a window's end that are made anew by the next window
SHARED = 256  # tokens before these, at the end of which two windows must agree
AGREED = 64  # so many of them


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text as the backend's own encoding tells them. N: tokens; places are characters."""

    ids_N: NDArray[np.int32]
    starts_N: NDArray[np.int32]
    ends_N: NDArray[np.int32]

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        made: list[int] = self.ids_N.tolist()
        return made

    def __len__(self) -> int:
        return len(self.ids_N)

    def char_to_token(self, place: int) -> int | None:
        """The first token that covers a character."""
        token = int(np.searchsorted(self.ends_N, place, side="right"))
        return token if token < len(self) and self.starts_N[token] <= place else None

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """The characters that a token covers."""
        return int(self.starts_N[token]), int(self.ends_N[token])


def _tokens(encoding: Any, start: int) -> Tokens:
    """The tokens of a window that begins at a character of the text."""
    ids_N = np.array(encoding.ids, dtype=np.int32)
    places_N2 = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) + start
    return Tokens(ids_N, places_N2[:, 0], places_N2[:, 1])


def _part(tokens: Tokens, start: int, end: int | None = None) -> Tokens:
    return Tokens(tokens.ids_N[start:end], tokens.starts_N[start:end], tokens.ends_N[start:end])


def _clear_cut(tokens: Tokens, last: int) -> int | None:
    """The last token up to `last` that alone begins where it does, and where the one before has ended."""
    starts_N, ends_N = tokens.starts_N[: last + 1], tokens.ends_N[: last + 1]
    clear_N = (starts_N[1:] > starts_N[:-1]) & (starts_N[1:] >= ends_N[:-1]) & (ends_N[1:] > starts_N[1:])
    found = np.flatnonzero(clear_N)
    return int(found[-1]) + 1 if len(found) else None


def _taken_over(tokens: Tokens, cut: int, following: Tokens) -> int | None:
    """Where the following window's tokens go on from `cut`; None when it cuts what is before it into other tokens."""
    place = int(np.searchsorted(following.starts_N, tokens.starts_N[cut]))
    if place < AGREED or place >= len(following):
        return None
    mine, theirs = _part(tokens, cut - AGREED, cut + 1), _part(following, place - AGREED, place + 1)
    pairs = ((mine.ids_N, theirs.ids_N), (mine.starts_N, theirs.starts_N), (mine.ends_N, theirs.ends_N))
    return place if all(np.array_equal(one, other) for one, other in pairs) else None


def tokenize(encode: Callable[[str], Any], text: str) -> Tokens:
    """The tokens of a text of any length; `encode` gives the backend's encoding of a stretch, nothing added.

    Where two windows cannot be made to agree, no token ends clearly where others do, and the text is tokenized whole.
    """
    found: list[Tokens] = []
    start, first = 0, 0  # of the window in the text, and of what is taken of it in tokens
    tokens = _tokens(encode(text[:WINDOW]), 0)
    while start + WINDOW < len(text):
        cut = _clear_cut(tokens, len(tokens) - UNSURE)
        back = None if cut is None else _clear_cut(tokens, cut - SHARED)
        if cut is None or back is None or cut <= first:
            return _tokens(encode(text), 0)
        start = int(tokens.starts_N[back])
        following = _tokens(encode(text[start : start + WINDOW]), start)
        taken = _taken_over(tokens, cut, following)
        if taken is None:
            return _tokens(encode(text), 0)
        found.append(_part(tokens, first, cut))
        tokens, first = following, taken
    found.append(_part(tokens, first))
    return Tokens(*(np.concatenate([getattr(part, name) for part in found]) for name in ("ids_N", "starts_N", "ends_N")))


def framed(tokens: Tokens, example: Any, length: int) -> Tokens:
    """The tokens with those around them that the tokenizer adds to a whole text, as to the one of an example's encoding.

    `length`: of the text in characters.
    """
    own = [place for place, added in enumerate(example.special_tokens_mask) if not added]
    before, behind = example.ids[: own[0]], example.ids[own[-1] + 1 :]
    ids_N = np.concatenate([np.array(before, np.int32), tokens.ids_N, np.array(behind, np.int32)])
    starts_N, ends_N = (np.pad(places_N, (len(before), 0)) for places_N in (tokens.starts_N, tokens.ends_N))
    return Tokens(ids_N, *(np.pad(places_N, (0, len(behind)), constant_values=length) for places_N in (starts_N, ends_N)))
