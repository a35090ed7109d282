"""What is told of a text: tokenizers whose tokens are no texts of their own, depths in rounds, and how long it is at most."""

from types import SimpleNamespace
from typing import Any

from longspec.measure.sample import sample_of

WORDS = ["<0>", " a", " b", " c", " d", " e", " f"]
BY_WORDS = SimpleNamespace(decode=lambda ids: "".join(WORDS[token] for token in ids).removeprefix(" "))  # as SentencePiece
BY_BYTES = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))  # of parts of characters too


def told(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(token["text"], token["depth"]) for token in found["tokens"]]


def test_rounds_by_hand() -> None:
    """Two drafts kept in the first round, none in the second; a last round may bring more than the text."""
    found = sample_of(BY_WORDS, [3, 4], [1, 3, 5, 6, 1], [2, 0])
    assert found["before"] == "c d"
    assert told(found) == [(" a", 0), (" c", 1), (" e", 2), (" f", 0), (" a", 0)]
    assert told(sample_of(BY_WORDS, [3], [1, 2], [2])) == [(" a", 0), (" b", 1)]


def test_a_character_of_several_tokens_stands_with_its_last() -> None:
    ids = list("xé∞".encode())
    assert [text for text, _ in told(sample_of(BY_BYTES, list(b"ab"), ids, [0] * 5))] == ["x", "", "é", "", "", "∞"]
