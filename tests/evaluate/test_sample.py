"""What was drafted for a text: a tree and chains made by hand, and tokenizers whose tokens are no texts of their own."""

from types import SimpleNamespace
from typing import Any

import torch

from longspec.evaluate.sample import Recorder, sample_of

WORDS = ["<0>", " a", " b", " c", " d", " e", " f"]


class Words:
    """A token is a word; as in SentencePiece a text begins without its space."""

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[token] for token in ids).removeprefix(" ")


class Bytes:
    """A token is a byte; what is no whole character is a replacement character."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def recorded(*proposals: tuple[list[int], list[int]]) -> Recorder:
    """A recorder that has seen these trees: tokens and parents of each."""
    trees = iter(proposals)

    def propose(*_: Any) -> Any:
        tokens, parents = next(trees)
        return SimpleNamespace(tokens_BS=torch.tensor([tokens]), parents_BS=torch.tensor([parents]))

    drafter = SimpleNamespace(
        reads=(), proposed=None, copied=0, acceptance=(), begin=lambda prompts, hidden: None, propose=propose
    )
    recorder = Recorder(drafter)  # type: ignore[arg-type]
    recorder.begin([[1]], {})
    for _ in proposals:
        recorder.propose(None, (), None)  # type: ignore[arg-type]
    return recorder


def told(found: dict[str, Any]) -> list[tuple[str, int, list[str]]]:
    return [(token["text"], token["depth"], token["rejected"]) for token in found["tokens"]]


def test_a_tree_by_hand() -> None:
    """Root a; its children b, c; below c: d, e; below d: f. Kept: c, e. Then a chain b, NOTHING of which none is kept."""
    tree = ([1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, 2, 3])
    found = sample_of(Words(), [3, 4], [1, 3, 5, 6, 1], [2, 0], recorded(tree, ([6, 2, -1], [-1, 0, 1])))
    assert found["before"] == "c d"
    assert told(found) == [(" a", 0, []), (" c", 1, []), (" e", 2, []), (" f", 0, []), (" a", 0, [" b"])]


def test_each_child_that_was_rejected_is_told_with_the_likeliest_below_it() -> None:
    """Nothing of the tree is kept: the target says e, drafted were b and (c, d, f)."""
    tree = ([1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, 2, 3])
    assert told(sample_of(Words(), [3], [1, 5], [0], recorded(tree)))[1] == (" e", 0, [" b", " c d f"])


def test_a_draft_that_was_right_is_not_rejected() -> None:
    """A token that ends the text counts as the target's own although it was drafted; a last round may bring too much."""
    assert told(sample_of(Words(), [3], [1, 2], [0], recorded(([1, 2], [-1, 0]))))[1] == (" b", 0, [])
    chain = ([1, 2, 3], [-1, 0, 1])
    assert told(sample_of(Words(), [3], [1, 2], [2], recorded(chain))) == [(" a", 0, []), (" b", 1, [])]


def test_a_character_of_several_tokens_stands_with_its_last() -> None:
    ids = list("xé∞".encode())
    chain = ([0, *b"\xc3\xa8"], [-1, 0, 1])
    tokens = told(sample_of(Bytes(), list(b"ab"), ids, [0] * 5, recorded(*[chain] * 5)))
    assert [text for text, _, _ in tokens] == ["x", "", "é", "", "", "∞"]
    assert tokens[3][2] == ["è"]


def test_the_sample_is_small() -> None:
    """However long prompt and text are, and however many children a tree has."""
    wide = ([1, *range(2, 7)] * 1, [-1, *[0] * 5])
    found = sample_of(Words(), [2] * 900, [1] * 301, [0] * 300, recorded(*[wide] * 300))
    assert (len(found["before"].split()), len(found["tokens"])) == (48, 200)
    assert len(found["tokens"][1]["rejected"]) == 4
