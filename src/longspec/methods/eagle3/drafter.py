"""Draft chains and trees with EAGLE-3 (arXiv 2503.01840, section 3.1), with its own keys and values.

Slot t holds token t + 1 and the target's hidden states of token t, so the root is in the text's newest slot. Below it, a node's
feature is the draft's own hidden state of its parent. When a node becomes text, its keys are made again, from the target's
hidden states: as in training, only a chain sees what the draft fed back to itself.

Shapes: B rows, E tokens taken in at once, W nodes of a level, S nodes of a tree with its root, T keys, H hidden width, K
key/value heads, D head width, V draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longspec.decode.budget import grown
from longspec.decode.drafters import DraftInput
from longspec.decode.levels import Budget, Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, TreeBuilder
from longspec.methods.own_layers_drafter import OwnLayersDrafter, places_of
from longspec.models.attention.backends import attend, attend_all


class Accepted(NamedTuple):
    """Hold text whose slots have no keys yet: tokens_BE[b, : counts_B[b]], the last still unknown, and their features."""

    tokens_BE: Tensor
    feature_BEH: Tensor
    counts_B: Tensor


class Eagle3Drafter(OwnLayersDrafter):
    """Propose tokens with an EAGLE-3 layer and its target."""

    accepted: Accepted | None
    hidden_BWH: Tensor | None = None  # of the newest level with logits

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Make the slots of each prompt, the newest where there is a window; the first round takes them in with the root."""
        self.caches = [self.empty_cache()]
        counts_B, found = self.newest(prompts, hidden)
        width = found[0].shape[1]
        rows = [[*prompt[1:], 0][-width:] for prompt in prompts]
        tokens_BE = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=counts_B.device)
        self.accepted = Accepted(tokens_BE, self.layer.feature(found), counts_B)

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return a tree of this shape; nothing is computed for its leaves."""
        builder = self.builder(draft_input)
        return grown(builder, shape, sampler, lambda: self.logits(draft_input, builder))

    def logits(self, draft_input: DraftInput, builder: TreeBuilder) -> Tensor:
        """Return the draft's logits of the token after each node of the newest level, [B, W, V].

        A node at depth d has the position of the root plus d, and is step d of the chain that starts in the root's slot.
        """
        depth, size = len(builder.sizes) - 1, builder.sizes[-1]
        feature_BWH = self._fed_back(builder) if depth else self._take_in_text(draft_input)
        positions_B1 = draft_input.lengths_B[:, None] + (depth - 1)
        embedded_BWH, rope = self.embedded(builder.tokens[-1], positions_B1.expand(-1, size))

        def attend_own(q_BNWD: Tensor, k_BKWD: Tensor, v_BKWD: Tensor) -> Tensor:
            keys, values = self.caches[0].with_nodes((k_BKWD, v_BKWD)) if depth else self.caches[0].of_text()
            scale, low = q_BNWD.shape[-1] ** -0.5, self._first_seen(draft_input, builder, keys.shape[2])
            if low is not None and q_BNWD.device.type == "cpu":  # where masks cost more than the products
                return attend_all(q_BNWD, keys[:, :, low:], values[:, :, low:], scale)
            seen = draft_input.visibility(builder, self.caches[0].first_B(draft_input.lengths_B), self.window, left_out=1)
            return attend(q_BNWD, keys, values, seen, scale)

        self.hidden_BWH = self.layer.midlayer(embedded_BWH, feature_BWH, rope, attend_own)
        return self.layer.logits(self.hidden_BWH)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Keep the new tokens, each with the target's hidden states of the token before it; the tree is forgotten."""
        self.accepted = Accepted(tokens_BE, self.layer.feature([hidden[name] for name in self.reads]), kept_B + 1)

    def _take_in_text(self, draft_input: DraftInput) -> Tensor:
        """Add keys and values of the new text's slots, the root's included; return the root's feature [B, 1, H].

        The draft has one layer, so the text's other slots need only keys and values.
        """
        assert self.accepted is not None
        lengths_B, counts_B, feature_BEH = draft_input.lengths_B, self.accepted.counts_B, self.accepted.feature_BEH
        last_B1 = counts_B[:, None] - 1
        tokens_BE = self.accepted.tokens_BE.scatter(1, last_B1, draft_input.roots_B[:, None])
        embedded_BEH, rope = self.embedded(tokens_BE, places_of(lengths_B, counts_B, tokens_BE.shape[1]))
        midlayer = self.layer.midlayer
        new = midlayer.self_attn.keys_values(midlayer.both(embedded_BEH, midlayer.hidden_norm(feature_BEH)), rope)
        self.caches[0].extend(new, counts_B, draft_input.lengths, lengths_B)
        return feature_BEH.gather(1, last_B1[:, :, None].expand(-1, -1, feature_BEH.shape[2]))

    def _fed_back(self, builder: TreeBuilder) -> Tensor:
        """Return the features [B, W, H] of the newest level's nodes: what their parents feed back."""
        assert self.hidden_BWH is not None
        first_of_above = builder.nodes - builder.sizes[-1] - builder.sizes[-2]
        parents_BW1 = (builder.parents[-1] - first_of_above)[:, :, None]
        return self.layer.fed_back(self.hidden_BWH).gather(1, parents_BW1.expand(-1, -1, self.hidden_BWH.shape[2]))

    def _first_seen(self, draft_input: DraftInput, builder: TreeBuilder, keys: int) -> int | None:
        """Return the first of `keys` keys that the newest node of a single row's chain sees; it sees all later ones. Else None.

        Key i has position length - held + i, with `held` slots of the text in the cache; keys at positions below 0 are empty.
        """
        if len(draft_input.lengths) > 1 or set(builder.sizes) != {1} or not keys:
            return None
        depth = len(builder.sizes) - 1
        held = keys - depth
        return max(0, held - draft_input.lengths[0], 0 if self.window is None else held - 1 + depth - self.window)


drafter = Eagle3Drafter
