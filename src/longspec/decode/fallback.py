"""Decoding without a draft model, and a draft that is left where it does not pay.

Shapes: B rows, E tokens of a path.
"""

import torch
from torch import Tensor

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Budget, Levels, Shape, depth_of
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, chains

TRUSTED = 16  # rounds of the text as which the evaluated acceptance counts


class NoDraft(Drafter):
    """Proposes nothing: plain decoding, a token a round."""

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        roots_B = draft_input.roots_B
        return chains(roots_B, torch.empty(len(roots_B), 0, dtype=roots_B.dtype, device=roots_B.device))


class WhilePays(Drafter):
    """A drafter until its rounds bring fewer tokens than they must, and then another one, to the end of the texts.

    expected: tokens a round as evaluated, which the texts' own rounds correct; needed: those with which a round is as fast as
    the other one, whose shape is other_shape and which needs no states of the target.
    """

    def __init__(self, drafter: Drafter, expected: float, needed: float, other: Drafter, other_shape: Shape) -> None:
        self.drafter, self.expected, self.needed, self.other = drafter, expected, needed, other
        self.levels = (1,) * depth_of(other_shape)
        self.reads, self.proposed = drafter.reads, drafter.proposed
        self.copied = max(drafter.copied, len(self.levels))

    def check(self, target: object) -> None:
        self.drafter.check(target)

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        self.pays, self.rounds, self.tokens, self.lengths = True, TRUSTED, TRUSTED * self.expected, tuple[int, ...]()
        self.drafter.begin(prompts, hidden)
        self.other.begin(prompts, {})

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return the drafter's tree, or the other's chain once the drafter has been left."""
        before, self.lengths = self.lengths, draft_input.lengths
        if self.pays and len(before) == len(self.lengths):  # else rows have left
            self.rounds += len(before)
            self.tokens += sum(self.lengths) - sum(before)
            self.pays = self.tokens >= self.needed * self.rounds
        if self.pays:
            return self.drafter.propose(draft_input, shape, sampler)
        return self.other.propose(draft_input, self.levels, sampler)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Hand the tokens on to the drafter, while it drafts; the other one reads them in the texts."""
        if self.pays:
            self.drafter.commit(tokens_BE, kept_B, hidden)

    def select(self, rows_B: Tensor) -> None:
        self.other.select(rows_B)
        if self.pays:
            self.drafter.select(rows_B)
