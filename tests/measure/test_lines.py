"""Figures by task, setting and bucket against sums made by hand, and the sample of a text that a line keeps."""

from types import SimpleNamespace
from typing import Any

from longspec.measure.lines import bucket_name, bucket_of, summarize
from longspec.measure.sample import sample_of

BASE = {"task": "a", "temperature": 0.0, "shape": 2, "tokens_compared": 7, "mismatches": 1, "near_ties": 1}
SECONDS = {"seconds_plain": 3.0, "seconds_speculative": 2.0, "seconds_draft": 0.5, "seconds_target": 1.0}


def line(**changes: object) -> dict[str, object]:
    """Rounds that kept 2, 0 and 1 drafted tokens of 2."""
    own = {"context_tokens": 100, "new_tokens": 6, "rounds": 3, "positions": [[2, 3], [1, 2]]}
    return BASE | SECONDS | own | changes


def test_the_buckets() -> None:
    found = {tokens: bucket_name(bucket_of(tokens)) for tokens in (0, 1023, 1024, 8191, 8192, 32767, 32768, 10**6)}
    assert list(found.values()) == ["0-1k", "0-1k", "1-2k", "4-8k", "8-16k", "16-32k", "32k+", "32k+"]


def test_figures_are_ratios_of_sums() -> None:
    other = line(context_tokens=900, new_tokens=3, rounds=1, positions=[[1, 1], [1, 1]], seconds_plain=1.0)
    rows = summarize([line(), line(context_tokens=5000), other, line(shape=[2, 3]), line(temperature=1.0)])
    assert [(row["shape"], row["temperature"], row["context"], row["prompts"]) for row in rows] == [
        (2, 0.0, "0-1k", 2),
        (2, 0.0, "4-8k", 1),
        ([2, 3], 0.0, "0-1k", 1),
        (2, 1.0, "0-1k", 1),
    ]
    first = rows[0]
    assert (first["tokens_compared"], first["mismatches"], first["near_ties"]) == (14, 2, 2)
    assert first["acceptance_length"] == 9 / 4
    assert first["position_acceptance"] == [3 / 4, 2 / 3]
    assert (first["tokens_per_second"], first["tokens_per_second_plain"]) == (9 / 4, 9 / 4)
    assert (first["speed_up"], first["draft_share"]) == (1.0, 0.25)
    assert rows[1]["speed_up"] == 1.5


def test_what_nothing_was_measured_for_is_told_as_nothing() -> None:
    """A text that ended with its first token has no round and takes no time."""
    none = dict.fromkeys(SECONDS, 0.0) | {"new_tokens": 0, "rounds": 0, "positions": [[0, 0], [0, 0]]}
    [row] = summarize([line(**none)])
    assert [row[name] for name in ("acceptance_length", "speed_up", "draft_share")] == [None] * 3
    assert row["position_acceptance"] == [None, None]


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
