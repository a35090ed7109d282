"""What is told of a text: tokenizers whose tokens are no texts of their own, depths in rounds, and how long it is at most."""

from typing import Any

from longspec.measure.sample import sample_of

WORDS = ["<0>", " a", " b", " c", " d", " e", " f"]


class Words:
    """A token is a word; as in SentencePiece a text begins without its space."""

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[token] for token in ids).removeprefix(" ")


class Bytes:
    """A token is a byte; what is no whole character is a replacement character."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def told(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(token["text"], token["depth"]) for token in found["tokens"]]


def test_rounds_by_hand() -> None:
    """Two drafts kept in the first round, none in the second; a last round may bring more than the text."""
    found = sample_of(Words(), [3, 4], [1, 3, 5, 6, 1], [2, 0])
    assert found["before"] == "c d"
    assert told(found) == [(" a", 0), (" c", 1), (" e", 2), (" f", 0), (" a", 0)]
    assert told(sample_of(Words(), [3], [1, 2], [2])) == [(" a", 0), (" b", 1)]


def test_a_character_of_several_tokens_stands_with_its_last() -> None:
    ids = list("xé∞".encode())
    assert [text for text, _ in told(sample_of(Bytes(), list(b"ab"), ids, [0] * 5))] == ["x", "", "é", "", "", "∞"]
