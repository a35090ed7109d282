"""Chains of one token, by one product with the state before the root.

Shapes: B rows, T tokens of the longest prompt, E tokens of a path, H hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftToTarget, DraftTree, TreeBuilder
from longspec.draft_vocabulary import DraftVocabulary
from longspec.states.tensors import FINAL


class MadeUpDrafter(Drafter):
    """One level of drafted tokens, of which the state before the root says which are likely."""

    reads = (FINAL,)

    def __init__(self, target: Any, layer: nn.Module, vocabulary: DraftVocabulary | None = None) -> None:
        self.target, self.layer, self.draft_to_target, self.proposed = target, layer, None, None
        if vocabulary is not None:
            ids_V, self.proposed = torch.tensor(vocabulary.ids, device=target.device), len(vocabulary.ids)
            self.draft_to_target = DraftToTarget(ids_V, vocabulary.size)
        self.newest_BH = torch.empty(0)  # of the token before the root

    def check(self, target: Any) -> None:
        """Raise ValueError for another target than its own."""
        if target is not self.target:
            raise ValueError("draft: this drafter was made for another target; make one for this target")

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """The last token of each prompt."""
        final_BTH = hidden[FINAL]
        last_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=final_BTH.device)
        self.newest_BH = final_BTH[torch.arange(len(prompts), device=final_BTH.device), last_B]

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """The first of the levels."""
        logits_BV = self.target.lm_head(self.layer(self.newest_BH))
        logits_BV = logits_BV if self.draft_to_target is None else logits_BV[:, self.draft_to_target.ids_V]
        growth = TreeBuilder(draft_input.roots_B, self.draft_to_target)
        growth.grow_all(levels[:1], sampler, lambda: logits_BV[:, None])
        return growth.tree()

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """The last token that became text."""
        self.newest_BH = hidden[FINAL][torch.arange(len(kept_B), device=kept_B.device), kept_B]

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        self.newest_BH = self.newest_BH[rows_B]


def drafter(target: Any, layer: nn.Module, settings: Any, vocabulary: DraftVocabulary | None) -> MadeUpDrafter:
    """Chains of one token."""
    return MadeUpDrafter(target, layer, vocabulary)
