"""Hidden states that a drafter reads, at the start and after each verification, against transformers' own of the text."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Levels
from longspec.decode.prefill import prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import DraftTree, TreeBuilder
from tests.decode.models import generated, make_target
from tests.refusals import refused

NEW, LENGTHS = 30, (7, 1, 19, 4, 4)
READS = ("hidden.2", "final", "hidden.0")


def own_states(target: Any, text: list[int]) -> dict[str, Tensor]:
    """transformers' hidden states of a whole text, [T, H] each."""
    hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    return {name: hidden[-1 if name == "final" else int(name.removeprefix("hidden."))][0] for name in READS}


class Reader(Drafter):
    """Knows each row's text, says some at random places of a tree, and holds what it gets against transformers' own."""

    reads = READS

    def __init__(self, target: Any, texts: list[list[int]]) -> None:
        self.texts, self.random = texts, random.Random(0)
        self.own = [own_states(target, text) for text in texts]  # a token's states do not hang on those after it
        self.rows: list[dict[str, Tensor]] = []  # of each row, the states of its text so far, [T, H] each
        self.batches, self.kept, self.compared = list[int](), list[int](), 0

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        assert hidden.keys() == set(self.reads)
        places = [(row, len(prompt)) for row, prompt in enumerate(prompts)]
        self.rows = [{name: hidden_BTH[row, :length] for name, hidden_BTH in hidden.items()} for row, length in places]

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        self.batches.append(len(draft_input.texts))
        for text, held in zip(draft_input.texts, self.rows, strict=True):
            for name, wanted_TH in self.own[self.number(text)].items():
                torch.testing.assert_close(held[name], wanted_TH[: len(text) - 1], rtol=1e-9, atol=1e-9)
                self.compared += 1
        return self.tree(draft_input, levels)

    def tree(self, draft_input: DraftInput, levels: Levels) -> DraftTree:
        builder = TreeBuilder(draft_input.roots_B)
        true = [self.true_tokens(text, len(levels)) for text in draft_input.texts]
        places = [0] * len(true)
        for level, size in enumerate(levels):
            above = places
            places = [self.random.randrange(size) for _ in true]
            parents = torch.tensor([[self.random.randrange(builder.sizes[-1]) for _ in range(size)] for _ in true])
            tokens = torch.tensor([[(ahead[level] + 1 + place) % 61 for place in range(size)] for ahead in true])
            for row, ahead in enumerate(true):
                parents[row, places[row]], tokens[row, places[row]] = above[row], ahead[level]
            builder.add(parents, tokens)
        return builder.tree()

    def true_tokens(self, text: list[int], count: int) -> list[int]:
        """The tokens that follow, up to a random one, from which on they are wrong."""
        whole = self.texts[self.number(text)] + [0] * count
        right, ahead = self.random.randrange(count + 1), whole[len(text) :][:count]
        return [(token + 30 * (place >= right)) % 61 for place, token in enumerate(ahead)]

    def number(self, text: list[int]) -> int:
        """Which text this is the beginning of."""
        (number,) = (number for number, known in enumerate(self.texts) if known[: len(text)] == text)
        return number

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        assert hidden.keys() == set(self.reads)
        for row, kept in enumerate(kept_B.tolist()):
            self.kept.append(kept)
            for name, held_TH in self.rows[row].items():
                self.rows[row][name] = torch.cat([held_TH, hidden[name][row, : kept + 1]])

    def select(self, rows_B: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows_B.tolist()]


@pytest.mark.parametrize(
    ("family", "shape", "lengths"),
    [(Qwen2Config, 3, LENGTHS), (LlamaConfig, (2, 5, 4), LENGTHS[:1]), (MistralConfig, (2, 5, 4), LENGTHS)],
)
def test_hidden_states_are_transformers_own(family: type, shape: int | Levels, lengths: tuple[int, ...]) -> None:
    """float64; rows of different length, chains and trees that are kept in part, rows that leave the batch."""
    sliding = {"sliding_window": 9} if family is MistralConfig else {}
    target = make_target(3, family, num_hidden_layers=3, **sliding)
    prompts = [torch.randint(0, 61, (length,)).tolist() for length in lengths]
    expected = [generated(target, prompt, NEW) for prompt in prompts]
    reader = Reader(target, [prompt + text for prompt, text in zip(prompts, expected, strict=True)])
    start = replace(prefill(target, prompts, reads=READS), is_last=True)
    decoded = speculate(target, reader, start, max_new_tokens=NEW, shape=shape)
    assert not start.hidden, "which are large, and have been read"
    assert [row.ids for row in decoded.rows] == expected
    assert {0, 1} <= set(reader.kept)
    assert reader.compared == len(READS) * sum(reader.batches)
    assert len(lengths) == 1 or len(set(reader.batches)) > 1, "no row has left the batch"


def test_a_start_without_these_states_is_refused() -> None:
    target = make_target(3, num_hidden_layers=3)
    with refused("prompts", "hidden.0", "prefill(..., reads=drafter.reads)"):
        speculate(target, Reader(target, []), prefill(target, [[3, 1, 4]]), max_new_tokens=1)
