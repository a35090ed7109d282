"""What proposes tokens, and one that needs no model: the text itself.

Shapes: B rows, E tokens of a path, T cached tokens, K key/value heads, D head width (of keys), D depth (of chains).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree, Levels, chains


@dataclass
class Frontier:
    """Where the rows stand when a round begins. A row's newest token, the root, is not yet in the target's cache.

    texts: prompt and tokens, root included; lengths: cached tokens of each row, len(text) - 1, on the host and the device;
    last layer's keys and values of the target [B, K, T, D], left-aligned.
    """

    texts: list[list[int]]
    lengths: tuple[int, ...]
    lengths_B: Tensor
    roots_B: Tensor
    target: tuple[Tensor, Tensor]


class Drafter(Protocol):
    """Proposes trees of tokens that may follow."""

    def begin(self, prompts: list[list[int]]) -> None:
        """New texts, one a row."""

    def propose(self, frontier: Frontier, levels: Levels, sampler: Sampler) -> DraftTree:
        """A tree for each row, of `levels` or fewer of them."""
        ...

    def commit(self, path_BE: Tensor, kept_B: Tensor) -> None:
        """Of the tree last proposed the nodes path_BE[b, : kept_B[b] + 1] have become text."""

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""


class Stateless:
    """A drafter that needs nothing but the frontier."""

    def begin(self, prompts: list[list[int]]) -> None:
        """Nothing to do."""

    def commit(self, path_BE: Tensor, kept_B: Tensor) -> None:
        """Nothing to do."""

    def select(self, rows_B: Tensor) -> None:
        """Nothing to do."""


class LookupDrafter(Stateless):
    """Prompt lookup: what followed the newest n-gram earlier in the text (transformers' own generator)."""

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram

    def propose(self, frontier: Frontier, levels: Levels, sampler: Sampler) -> DraftTree:
        """A chain as deep as `levels`, shorter where the text holds no earlier match."""
        found = [self._lookup(text, len(levels)) for text in frontier.texts]
        filled = [chain + [NOTHING] * (max(map(len, found)) - len(chain)) for chain in found]
        return chains(frontier.roots_B, torch.tensor(filled, dtype=torch.int64, device=frontier.roots_B.device))

    def _lookup(self, text: list[int], count: int) -> list[int]:
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=count, max_matching_ngram_size=self.max_ngram, max_length=len(text) + count + 1
        )
        candidates_BS, _ = generator.get_candidates(torch.tensor([text]))
        return candidates_BS[0, len(text) :].tolist()
