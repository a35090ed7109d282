"""Decoding without a draft model, and a draft that is left where it does not pay.

Shapes: B rows, E tokens of a path.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Budget, Levels, Shape, depth_of
from longspec.decode.lookup import Followers
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, chains

TRUSTED = 16  # rounds of the text as which the evaluated acceptance counts


class NoDraft(Drafter):
    """Proposes nothing: plain decoding, a token a round."""

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        roots_B = draft_input.roots_B
        return chains(roots_B, torch.empty(len(roots_B), 0, dtype=roots_B.dtype, device=roots_B.device))


class Watched:
    """Counts the tokens that rounds of prompt lookup would have brought so far, on a text that another way decodes."""

    def __init__(self, prompt: list[int]) -> None:
        self.followers, self.place = Followers(), len(prompt)  # where its next round would begin

    def rounds(self, text: list[int], depth: int) -> Iterator[int]:
        """Yield the tokens of each round that the text decides by now."""
        while self.place < len(text):
            copied = self.followers.of(text[: self.place], depth)
            followed = text[self.place : self.place + len(copied)]
            kept = next(
                (at for at, pair in enumerate(zip(copied, followed, strict=False)) if pair[0] != pair[1]), len(followed)
            )
            if kept == len(followed) and len(text) <= self.place + len(copied):
                return
            self.place += kept + 1
            yield kept + 1


class WhilePays(Drafter):
    """A drafter until its rounds bring fewer tokens than they must, and then another one, to the end of the texts.

    expected: tokens a round as evaluated, which the texts' own rounds correct; needed: those with which a round is as fast as
    plain decoding. other: what it is left for, which needs no states of the target, with its shape. copies: where that is
    prompt lookup, the tokens of a round of the drafter that one of lookup's is worth. How much lookup brings depends on the
    text, so what was evaluated of it counts nothing here: it is watched.
    """

    def __init__(
        self,
        drafter: Drafter,
        expected: float,
        needed: float,
        other: Drafter,
        other_shape: Shape,
        copies: float | None = None,
    ) -> None:
        self.drafter, self.expected, self.needed, self.other, self.copies = drafter, expected, needed, other, copies
        self.levels = (1,) * depth_of(other_shape)
        self.reads, self.proposed = drafter.reads, drafter.proposed
        self.copied = max(drafter.copied, len(self.levels))

    def check(self, target: object) -> None:
        self.drafter.check(target)

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        self.pays, self.rounds, self.tokens, self.lengths = True, TRUSTED, TRUSTED * self.expected, tuple[int, ...]()
        self.watched, self.copied_tokens = [Watched(prompt) for prompt in prompts], list[int]()  # of lookup's rounds
        self.drafter.begin(prompts, hidden)
        self.other.begin(prompts, {})

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return the drafter's tree, or the other's chain once the drafter has been left."""
        before, self.lengths = self.lengths, draft_input.lengths
        if self.pays and len(before) == len(self.lengths):  # else rows have left
            self.rounds += len(before)
            self.tokens += sum(self.lengths) - sum(before)
            self.pays = self.tokens >= self.needed * self.rounds and not self._copying_pays(draft_input.texts)
        if self.pays:
            return self.drafter.propose(draft_input, shape, sampler)
        return self.other.propose(draft_input, self.levels, sampler)

    def _copying_pays(self, texts: list[list[int]]) -> bool:
        """Tell whether prompt lookup would be sooner, by enough of its rounds on these texts."""
        if self.copies is None:
            return False
        for watched, text in zip(self.watched, texts, strict=True):
            self.copied_tokens += watched.rounds(text, len(self.levels))
        rounds = len(self.copied_tokens)
        return rounds >= TRUSTED // 2 and self.tokens / self.rounds < self.copies * sum(self.copied_tokens) / rounds

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Hand the tokens on to the drafter, while it drafts; the other one reads them in the texts."""
        if self.pays:
            self.drafter.commit(tokens_BE, kept_B, hidden)

    def select(self, rows_B: Tensor) -> None:
        self.watched = [self.watched[row] for row in rows_B.tolist()]
        self.other.select(rows_B)
        if self.pays:
            self.drafter.select(rows_B)
