"""A DFlash draft's chains and trees: one forward fills a block, whose slots say what may stand at each depth.

Slots do not know of each other's tokens, so every node of a level has the same distribution below it, and a beam of paths is
the likeliest ones by their products. The keys of the text are made of the target's hidden states once, when it becomes text;
the block's own are dropped after each round.

Shapes: B rows, E tokens taken in at once, W slots of a round's block, H hidden width, N query heads, K key/value heads, D head
width, C nodes of a level, V draft vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspec.decode.budget import grown, out_of_slots
from longspec.decode.cache import NewestTokens, OwnCache, WholeText
from longspec.decode.drafters import Drafter, DraftInput, check_beside
from longspec.decode.levels import Budget, Levels, depth_of
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftToTarget, DraftTree, TreeBuilder
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.dflash.layer import DFlashLayer
from longspec.methods.dflash.settings import Settings, layers_of, mask_token_of
from longspec.methods.vocabulary_tensors import check_vocabulary
from longspec.models.attention.backends import attend
from longspec.models.attention.chains import KeysValues
from longspec.models.attention.visibility import TreeVisibility
from longspec.models.draft_attention import rotations
from longspec.states.tensors import HIDDEN


class Accepted(NamedTuple):
    """Text whose keys are not made yet: context_BEH[b, : counts_B[b]], which ends before the root."""

    context_BEH: Tensor
    counts_B: Tensor


class DFlashDrafter(Drafter):
    """Proposes by a DFlash layer beside its target. Chains are drawn from the draft when sampling, trees are its beams.

    Raises ValueError for settings whose draft vocabulary was not read.
    """

    def __init__(self, target: Any, layer: DFlashLayer, settings: Settings) -> None:
        check_vocabulary(settings)
        self.target, self.layer, self.settings = target, layer, settings
        taps = layers_of(settings.layers, target.config.num_hidden_layers)
        self.reads = tuple(f"{HIDDEN}{number}" for number in taps)
        self.proposed = settings.vocabulary
        self.mask_token = mask_token_of(settings.mask_token, target.config.vocab_size)
        self.text: list[OwnCache] = []  # of each layer
        self.accepted: Accepted | None = None

    def check(self, target: Any) -> None:
        """Raise ValueError for another target than its own, and for a layer that does not stand beside it."""
        check_beside(self.target, target, self.layer.fc.weight)
        own, width = self.layer.fc.out_features, target.config.hidden_size
        if own != width:
            raise ValueError(f"draft: its layer has hidden_size {own}, the target {width}: give a draft of this target")
        chosen_from, size = self.settings.target_vocabulary, target.config.vocab_size
        if self.proposed is not None and chosen_from not in (None, size):
            raise ValueError(f"draft: proposes tokens of {chosen_from}, the target has {size}: give a draft of this target")

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Return the context of each prompt, of its newest tokens where there is a window; the first round takes it in."""
        window = self.settings.sliding_window
        self.text = [WholeText() if window is None else NewestTokens(window) for _ in self.layer.layers]
        self._accept(torch.tensor(list(map(len, prompts)), device=hidden[self.reads[0]].device), hidden)

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """A tree of this shape, with as many levels as a block drafts at most.

        The block has a slot for each level and no more, as engines fill it: slots see the later ones.
        """
        ids_V, size = None if self.proposed is None else self.layer.ids_V, self.target.config.vocab_size
        builder = TreeBuilder(draft_input.roots_B, None if ids_V is None else DraftToTarget(ids_V, size))
        depth = min(depth_of(shape), self.settings.predicted)
        logits_BDV = self.logits(draft_input, 1 + depth)
        if isinstance(shape, Budget):
            return out_of_slots(builder, shape, sampler, logits_BDV)
        of_nodes = iter(logits_BDV[:, :, None].unbind(1))
        return grown(builder, shape[:depth], sampler, lambda: next(of_nodes).expand(-1, builder.sizes[-1], -1))

    def logits(self, draft_input: DraftInput, slots: int) -> Tensor:
        """Return the draft's logits of the tokens behind the root, [B, W - 1, V], over what it can say, from so many slots."""
        lengths_B = draft_input.lengths_B
        self._take_in_text(draft_input)
        depths_W = torch.arange(slots, device=lengths_B.device)
        tokens_BW = torch.full((len(lengths_B), slots), self.mask_token, device=lengths_B.device)
        tokens_BW[:, 0] = draft_input.roots_B
        embedded_BWH = self.target.model.embed_tokens(tokens_BW).to(tokens_BW.device)
        window = self.settings.sliding_window
        seen_WW = torch.ones(slots, slots, dtype=torch.bool, device=lengths_B.device)
        visibility = TreeVisibility(
            draft_input.lengths,
            lengths_B,
            (seen_WW if window is None else seen_WW.tril()).expand(len(lengths_B), -1, -1),
            depths_W,
            depths_W,
            first_B=self.text[0].first_B(lengths_B),
            window=None if window is None else window - 1,  # which counts the query itself
        )

        def attend_own(number: int, q_BNWD: Tensor, own: KeysValues) -> Tensor:
            return attend(q_BNWD, *self.text[number].with_nodes(own), visibility, q_BNWD.shape[-1] ** -0.5)

        hidden_BWH = self.layer(embedded_BWH, self._rope(embedded_BWH, lengths_B[:, None] + depths_W), attend_own)
        normed_BWH = self.layer.norm(hidden_BWH[:, 1:])
        if self.layer.lm_head is not None:
            return self.layer.lm_head(normed_BWH)
        return self.target.lm_head(normed_BWH).to(normed_BWH.device)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Return the context of the old root and of what was kept; the new root has none yet."""
        self._accept(kept_B + 1, hidden)

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        assert self.accepted is not None
        self.accepted = Accepted(*(x[rows_B] for x in self.accepted))
        for text in self.text:
            text.select(rows_B)

    def _accept(self, counts_B: Tensor, hidden: dict[str, Tensor]) -> None:
        self.accepted = Accepted(self.layer.context([hidden[name] for name in self.reads]), counts_B)

    def _take_in_text(self, draft_input: DraftInput) -> None:
        """Each layer's keys and values of the tokens that have become text."""
        assert self.accepted is not None
        (context_BEH, counts_B), lengths_B = self.accepted, draft_input.lengths_B
        places_BE = (lengths_B - counts_B)[:, None] + torch.arange(context_BEH.shape[1], device=lengths_B.device)
        keys_values = self.layer.context_keys_values(context_BEH, self._rope(context_BEH, places_BE))
        for text, new in zip(self.text, keys_values, strict=True):
            text.extend(new, counts_B, draft_input.lengths, lengths_B)

    def _rope(self, like: Tensor, positions_BW: Tensor) -> tuple[Tensor, Tensor]:
        if self.layer.rotation is not None:
            return self.layer.rotation(like, positions_BW)
        return rotations(self.target.model, like, positions_BW)


def drafter(target: Any, layer: DFlashLayer, settings: Settings, vocabulary: DraftVocabulary | None) -> DFlashDrafter:
    """Chains and trees, of the tokens that its own head or the target's proposes."""
    assert vocabulary is None, "methods.drafter hands it none"
    return DFlashDrafter(target, layer, settings)
