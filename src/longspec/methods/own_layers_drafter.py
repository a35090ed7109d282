"""Share code of drafters whose draft has its own layers and reads inputs of the target's layers.

Shapes: B rows, W tokens, E tokens that have become text, H hidden width, V draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from longspec.decode.cache import NewestTokens, OwnCache, WholeText
from longspec.decode.drafters import Drafter, DraftInput, check_beside
from longspec.decode.tree import DraftToTarget, TreeBuilder
from longspec.methods.own_layers import Rope
from longspec.states.tensors import HIDDEN


class OwnLayersDrafter(Drafter):
    """Propose tokens with layers next to their target. When sampling, chains are drawn from the draft; trees are its beams.

    caches: of the draft's own keys and values, by layer. accepted: text not yet in the caches, a named tuple of tensors by row;
    None before the first prompt.
    """

    caches: list[OwnCache]
    accepted: Any

    def __init__(self, target: Any, layer: Any, settings: Any, vocabulary: None = None) -> None:
        assert settings.vocabulary is None or settings.ids is not None, "methods.vocabulary_for has read the file"
        assert vocabulary is None, "methods.drafter hands it none"
        self.target, self.layer, self.settings = target, layer, settings
        self.reads = tuple(f"{HIDDEN}{number}" for number in settings.read_of(target.config.num_hidden_layers))
        self.proposed = settings.vocabulary
        window = settings.sliding_window
        self.window = None if window is None else window - 1  # the setting counts the query itself
        self.caches, self.accepted = [], None

    def check(self, target: Any) -> None:
        """Raise ValueError for another target than its own, and if the layer is on another device or of another dtype."""
        check_beside(self.target, target, self.layer.fc.weight)

    def select(self, rows_B: Tensor) -> None:
        """Keep these rows alone."""
        assert self.accepted is not None
        self.accepted = type(self.accepted)(*(x[rows_B] for x in self.accepted))
        for cache in self.caches:
            cache.select(rows_B)

    def newest(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return of each prompt the newest tokens that the window holds: their count [B], and what is read, [B, E, H] each."""
        found = [hidden[name] for name in self.reads]
        longest, device = max(map(len, prompts)), found[0].device
        lengths_B = torch.tensor(list(map(len, prompts)), device=device)
        width = min(longest, self.settings.sliding_window or longest)
        counts_B = lengths_B.clamp_max(width)
        if width == longest:
            return counts_B, found
        at_BE1 = places_of(lengths_B, counts_B, width).clamp_max(longest - 1)[:, :, None]
        return counts_B, [x.gather(1, at_BE1.expand(-1, -1, x.shape[2])) for x in found]

    def empty_cache(self) -> OwnCache:
        """Return a cache of a layer's own keys and values, of the text or of its window."""
        window = self.settings.sliding_window
        return WholeText() if window is None else NewestTokens(window)

    def builder(self, draft_input: DraftInput) -> TreeBuilder:
        """Return a tree of the roots alone, for tokens of the draft's own vocabulary."""
        ids_V, size = None if self.proposed is None else self.layer.ids_V, self.target.config.vocab_size
        return TreeBuilder(draft_input.roots_B, None if ids_V is None else DraftToTarget(ids_V, size))

    def embedded(self, tokens_BW: Tensor, positions_BW: Tensor) -> tuple[Tensor, Rope]:
        """Return embeddings [B, W, H] and rotations."""
        embedded_BWH = self.target.model.embed_tokens(tokens_BW).to(tokens_BW.device)
        return embedded_BWH, self.layer.rope(self.target, embedded_BWH, positions_BW)


def places_of(lengths_B: Tensor, counts_B: Tensor, count: int) -> Tensor:
    """Return positions [B, count] of text: row b's first counts_B[b] are those of its last tokens, up to lengths_B[b]."""
    return (lengths_B - counts_B)[:, None] + torch.arange(count, device=lengths_B.device)
