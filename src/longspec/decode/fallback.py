"""Decoding without a draft model, and a draft that is left if it does not pay.

Shapes: B rows, E tokens of a path.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Budget, Levels
from longspec.decode.lookup import Followers, LookupDrafter
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, chains

TRUSTED = 16  # rounds of the text that the evaluated acceptance counts for
RECENT = 32  # rounds of lookup that decide its turns with plain decoding: a text may stop repeating itself


class NoDraft(Drafter):
    """Propose nothing: plain decoding, one token per round."""

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        roots_B = draft_input.roots_B
        return chains(roots_B, torch.empty(len(roots_B), 0, dtype=roots_B.dtype, device=roots_B.device))


class Watched:
    """Count the tokens that rounds of prompt lookup would have brought so far, on a text that another way decodes.

    tokens: of all its rounds; recent: of each of its newest rounds.
    """

    def __init__(self, prompt: list[int]) -> None:
        self.followers, self.text = Followers(), prompt.copy()  # the text as far as its rounds have come
        self.tokens, self.rounds, self.recent = 0, 0, deque[int](maxlen=RECENT)

    def watch(self, text: list[int], depth: int) -> None:
        """Count the rounds that the text so far decides."""
        while (place := len(self.text)) < len(text):
            copied = self.followers.of(self.text, depth)
            followed = text[place : place + len(copied)]
            kept = next((at for at, (a, b) in enumerate(zip(copied, followed, strict=False)) if a != b), len(followed))
            if kept == len(followed) and len(text) <= place + len(copied):
                return
            self.text += text[place : place + kept + 1]
            self.tokens, self.rounds = self.tokens + kept + 1, self.rounds + 1
            self.recent.append(kept + 1)


@dataclass(frozen=True)
class Copying:
    """Describe prompt lookup as a way to decode texts, by chains of `depth` tokens.

    needed: tokens per round with which it is as fast as plain decoding. pays: whether it should be faster, by the evaluation;
    how much it brings depends on the text, so this counts only until its first rounds there.
    """

    depth: int
    needed: float
    pays: bool


class WhilePays(Drafter):
    """Draft until the drafter's rounds bring too few tokens, then use prompt lookup or plain decoding, as the texts say.

    drafter: NoDraft if none should begin. expected: tokens of its round in the evaluation, which the texts' own rounds correct.
    needed: tokens per round with which it is as fast as plain decoding. copying: None if prompt lookup was not evaluated. What
    lookup's rounds would bring is counted on the texts, whatever decodes them. Neither lookup nor plain decoding needs states
    of the target, so they take turns.
    """

    def __init__(self, drafter: Drafter, expected: float, needed: float, copying: Copying | None) -> None:
        self.drafter, self.expected, self.needed, self.copying = drafter, expected, needed, copying
        self.lookup, self.levels = LookupDrafter(), (1,) * (copying.depth if copying else 0)
        self.reads, self.proposed, self.copied = drafter.reads, drafter.proposed, max(drafter.copied, len(self.levels))

    def check(self, target: object) -> None:
        self.drafter.check(target)

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        self.pays, self.lengths = not isinstance(self.drafter, NoDraft), tuple[int, ...]()
        self.rounds, self.tokens = TRUSTED, TRUSTED * self.expected
        self.watched = [Watched(prompt) for prompt in prompts]
        self.lookup.begin(prompts, {})
        self.drafter.begin(prompts, hidden)

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return the drafter's tree; once the drafter has been left, a copied chain or none."""
        if self.copying is not None:
            for watched, text in zip(self.watched, draft_input.texts, strict=True):
                watched.watch(text, self.copying.depth)
        before, self.lengths = self.lengths, draft_input.lengths
        if self.pays and len(before) == len(self.lengths):  # else rows have left
            self.rounds += len(before)
            self.tokens += sum(self.lengths) - sum(before)
            rate = self.tokens / self.rounds / self.needed
            # By all of lookup's rounds, not the recent ones: a draft that was left does not come back.
            copied = [each.tokens / each.rounds for each in self.watched if each.rounds]
            self.pays = rate >= 1 and self._copying_rate(copied, unknown=0.0) <= rate
        if self.pays:
            return self.drafter.propose(draft_input, shape, sampler)
        recent = [fmean(each.recent) for each in self.watched if each.recent]
        if self.copying is not None and self._copying_rate(recent, unknown=float(self.copying.pays)) >= 1:
            return self.lookup.propose(draft_input, self.levels, sampler)
        return NoDraft().propose(draft_input, shape, sampler)

    def _copying_rate(self, copied: list[float], unknown: float) -> float:
        """Return lookup's speed as a multiple of plain decoding's; `unknown` until enough of its rounds were watched.

        copied: tokens per round in each row that has had a round.
        """
        if self.copying is None or sum(each.rounds for each in self.watched) < TRUSTED // 2:
            return unknown
        return fmean(copied) / self.copying.needed

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Hand the tokens on to the drafter while it drafts; prompt lookup reads them in the texts."""
        if self.pays:
            self.drafter.commit(tokens_BE, kept_B, hidden)

    def select(self, rows_B: Tensor) -> None:
        self.watched = [self.watched[row] for row in rows_B.tolist()]
        self.lookup.select(rows_B)
        if self.pays:
            self.drafter.select(rows_B)
