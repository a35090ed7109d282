"""The tokens of answers: found by places in the text, and verified by decoding."""

import unicodedata
from collections.abc import Callable
from typing import Any

from longspec.data.chat.segments import Piece, Plan

EDGE = 16  # tokens at either edge of an answer that are decoded; what lies between them is between them in the text too


def _token_at(pieces: list[Piece], encodings: list[Any], place: int) -> int:
    """The first token that begins at a character or behind it."""
    before = 0
    for piece, encoding in zip(pieces, encodings, strict=True):
        local = place - piece.start
        if local <= 0:
            return before
        # A tokenizer may give no position for white space; then the character behind it counts.
        for probe in range(local, len(piece.text)):
            token = encoding.char_to_token(probe)
            if token is not None:
                return before + token + (encoding.token_to_chars(token)[0] < local)
        before += len(encoding)
    return before


def _is_same(expected: str, decoded: str, compare: Callable[[str, str], bool]) -> bool:
    """Whether two texts compare as they are or in the form that Unicode holds equal, into which some tokenizers bring them.

    Some begin each stretch between special tokens with a space of their own.
    """
    forms = [decoded, decoded.removeprefix(" ")]
    normal = unicodedata.normalize("NFKC", expected)
    return any(compare(expected, form) or compare(normal, unicodedata.normalize("NFKC", form)) for form in forms)


def _stretches(ids: list[int], start: int, end: int) -> list[list[int]]:
    """Tokens to decode when an answer is checked: those before it, those and its first ones, its last ones."""
    before = max(0, start - EDGE)
    places = [(before, start), (before, min(end, start + EDGE)), (max(start, end - EDGE), end)]
    return [ids[first:last] for first, last in places]


def _is_exact(expected: str, decoded: list[str], is_short: bool) -> bool:
    """Whether an answer's decoded edges are those of its text; of a short one, whether the whole is."""
    before, opened, last = decoded
    if not opened.startswith(before):
        return False
    first = opened[len(before) :]
    if is_short:
        return _is_same(expected, first, str.__eq__)
    # A character may reach over the edge of what was decoded; then its first or last bytes alone cannot be.
    starts = _is_same(expected, first.rstrip("\ufffd"), str.startswith)
    return starts and _is_same(expected, last.lstrip("\ufffd"), str.endswith)


def verified(
    tokenizer: Any, plans: list[Plan], encodings: list[list[Any]], ids: list[list[int]]
) -> list[list[tuple[int, int]] | None]:
    """The tokens [start, end) of each plan's answers; None where decoding them gives another text.

    So it is where a token reaches over an answer's edge.
    """
    found: list[list[tuple[int, int]] | None] = []
    checks: list[tuple[int, str, bool]] = []
    stretches: list[list[int]] = []
    for i, (made, parts) in enumerate(zip(plans, encodings, strict=True)):
        text, spans = made.text(), made.answers or []
        edges = [[_token_at(made.pieces, parts, place) for place in span] for span in spans]
        found.append([(start, end) for start, end in edges])
        for (start, end), (first, last) in zip(edges, spans, strict=True):
            checks.append((i, text[first:last], end - start <= EDGE))
            stretches += _stretches(ids[i], start, end)
    decoded = tokenizer.backend_tokenizer.decode_batch(stretches, skip_special_tokens=False)
    for number, (i, expected, is_short) in enumerate(checks):
        if not _is_exact(expected, decoded[3 * number : 3 * number + 3], is_short):
            found[i] = None
    return found
