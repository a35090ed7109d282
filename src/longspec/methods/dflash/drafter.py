"""Draft chains and trees with DFlash: one forward fills a block, whose slots give the tokens of each depth.

Slots do not know each other's tokens, so every node of a level has the same distribution below it, and a beam holds the paths
with the highest products. The target's hidden states give the text's keys once, when the text is accepted; the block's own keys
are dropped after each round.

Shapes: B rows, E tokens taken in at once, W slots of a round's block, H hidden width, N query heads, K key/value heads, D head
width, C nodes of a level, V draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longspec.decode.budget import grown, out_of_slots
from longspec.decode.drafters import DraftInput
from longspec.decode.levels import Budget, Levels, depth_of
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree
from longspec.methods.dflash.settings import mask_token_of
from longspec.methods.own_layers_drafter import OwnLayersDrafter, places_of
from longspec.models.attention.backends import attend
from longspec.models.attention.chains import KeysValues
from longspec.models.attention.visibility import TreeVisibility


class Accepted(NamedTuple):
    """Hold text whose keys are not made yet: context_BEH[b, : counts_B[b]], which ends before the root."""

    context_BEH: Tensor
    counts_B: Tensor


class DFlashDrafter(OwnLayersDrafter):
    """Propose tokens with a DFlash layer and its target."""

    accepted: Accepted | None

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Make the context of each prompt, of its newest tokens where there is a window; the first round takes it in."""
        self.caches = [self.empty_cache() for _ in self.layer.layers]
        counts_B, found = self.newest(prompts, hidden)
        self.accepted = Accepted(self.layer.context(found), counts_B)

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return a tree of this shape, with at most as many levels as a block drafts.

        The block has one slot for each level, as in engines. More slots would change it: slots see the later ones.
        """
        builder = self.builder(draft_input)
        depth = min(depth_of(shape), self.settings.predicted)
        logits_BDV = self.logits(draft_input, 1 + depth)
        if isinstance(shape, Budget):
            return out_of_slots(builder, shape, sampler, logits_BDV)
        of_nodes = iter(logits_BDV[:, :, None].unbind(1))
        return grown(builder, shape[:depth], sampler, lambda: next(of_nodes).expand(-1, builder.sizes[-1], -1))

    def logits(self, draft_input: DraftInput, slots: int) -> Tensor:
        """Return the draft's logits after the root, [B, W - 1, V] over the tokens it can propose. slots: W of the block."""
        lengths_B = draft_input.lengths_B
        self._take_in_text(draft_input)
        depths_W = torch.arange(slots, device=lengths_B.device)
        mask_token = mask_token_of(self.settings.mask_token, self.target.config.vocab_size)
        tokens_BW = torch.full((len(lengths_B), slots), mask_token, device=lengths_B.device)
        tokens_BW[:, 0] = draft_input.roots_B
        embedded_BWH, rope = self.embedded(tokens_BW, lengths_B[:, None] + depths_W)
        seen_WW = torch.ones(slots, slots, dtype=torch.bool, device=lengths_B.device)
        visibility = TreeVisibility(
            draft_input.lengths,
            lengths_B,
            (seen_WW if self.window is None else seen_WW.tril()).expand(len(lengths_B), -1, -1),
            depths_W,
            depths_W,
            first_B=self.caches[0].first_B(lengths_B),
            window=self.window,
        )

        def attend_own(number: int, q_BNWD: Tensor, own: KeysValues) -> Tensor:
            return attend(q_BNWD, *self.caches[number].with_nodes(own), visibility, q_BNWD.shape[-1] ** -0.5)

        hidden_BWH = self.layer(embedded_BWH, rope, attend_own)
        normed_BWH = self.layer.norm(hidden_BWH[:, 1:])
        if self.layer.lm_head is not None:
            return self.layer.lm_head(normed_BWH)
        return self.target.lm_head(normed_BWH).to(normed_BWH.device)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Return the context of the old root and of what was kept; the new root has none yet."""
        self.accepted = Accepted(self.layer.context([hidden[name] for name in self.reads]), kept_B + 1)

    def _take_in_text(self, draft_input: DraftInput) -> None:
        """Add each layer's keys and values of the tokens that have become text to its cache."""
        assert self.accepted is not None
        (context_BEH, counts_B), lengths_B = self.accepted, draft_input.lengths_B
        places_BE = places_of(lengths_B, counts_B, context_BEH.shape[1])
        rope = self.layer.rope(self.target, context_BEH, places_BE)
        keys_values = self.layer.context_keys_values(context_BEH, rope)
        for text, new in zip(self.caches, keys_values, strict=True):
            text.extend(new, counts_B, draft_input.lengths, lengths_B)


drafter = DFlashDrafter
