"""A GLIDE draft's trees and chains (LongSpec 3.3), with a cache of its own that holds its window at most.

Shapes: B rows, W tokens taken in at once, P cached tokens of the window, S nodes of a tree with its root, E tokens of a path,
H hidden width, K key/value heads, D head width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from longspec.decode.drafters import DraftInput
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, Levels, TreeBuilder
from longspec.methods.glide.layer import GlideLayer
from longspec.models.attention.tree_visibility import TreeVisibility
from longspec.states.tensors import KEYS, VALUES


class GlideDrafter:
    """Proposes by a draft layer beside its target. Chains are drawn from the draft when sampling, trees are its beams."""

    def __init__(self, target: Any, layer: GlideLayer, window: int) -> None:
        self.target, self.layer, self.window = target, layer, window
        last = target.config.num_hidden_layers - 1
        self.reads = (f"{KEYS}{last}", f"{VALUES}{last}")
        self.own: tuple[Tensor, Tensor] | None = None  # [B, K, P, D], right-aligned: the newest tokens before the root
        self.tree_own: list[tuple[Tensor, Tensor]] = []  # of the tree last proposed, level by level

    def check(self, target: Any) -> None:
        """Raise ValueError for another target than its own, and for a layer that does not stand beside it."""
        if target is not self.target:
            raise ValueError("draft: this drafter was made for another target; make one for this target, as by load_drafter")
        weight = self.layer.self_attn.q_proj.weight
        if (weight.dtype, weight.device) != (target.dtype, target.device):
            raise ValueError(
                f"draft: its layer is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}: move "
                "the layer by .to(target.device, target.dtype), or make the drafter after the target has moved"
            )

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Keys and values of each prompt's last `window` tokens."""
        width, device = min(self.window, max(map(len, prompts))), self.target.device
        newest = [[0] * (width - len(prompt)) + prompt[max(0, len(prompt) - width) :] for prompt in prompts]
        first_B1 = torch.tensor([[len(prompt) - width] for prompt in prompts], device=device)
        positions_BW = (first_B1 + torch.arange(width, device=device)).clamp_min(0)
        _, self.own = self._take_in(torch.tensor(newest, device=device), positions_BW)[1:]

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """A tree of exactly these levels."""
        is_drawn = not sampler.greedy and all(size == 1 for size in levels)
        builder = TreeBuilder(draft_input.roots_B)
        self.tree_own = []
        for size in levels:
            log_q_BWV = sampler.log_probabilities(self.logits(draft_input, builder).flatten(0, 1)).unflatten(
                0, (-1, builder.sizes[-1])
            )
            builder.grow(log_q_BWV, size, sampler if is_drawn else None)
        self._take_in_level(draft_input, builder)  # the leaves, which may become text too
        return builder.tree()

    def logits(self, draft_input: DraftInput, builder: TreeBuilder) -> Tensor:
        """The draft's logits of the token after each node of the newest level, [B, W, V].

        A node at depth d sees all of the target's cache, which ends d + 1 tokens before it: the lag d + 1 of training.
        """
        embedded_BWH, rope = self._take_in_level(draft_input, builder)
        size, device = builder.sizes[-1], draft_input.roots_B.device
        depths = [torch.full((count,), level, device=device) for level, count in enumerate(builder.sizes)]
        assert self.own is not None
        own_visibility = TreeVisibility(
            draft_input.lengths,
            draft_input.lengths_B,
            builder.seen_BSS[:, -size:],
            depths[-1],
            torch.cat(depths),
            first_B=draft_input.lengths_B - self.own[0].shape[2],
            window=self.window,
        )
        nothing_BW0, no_depths = builder.seen_BSS[:, -size:, :0], depths[-1][:0]
        target_visibility = TreeVisibility(draft_input.lengths, draft_input.lengths_B, nothing_BW0, depths[-1], no_depths)
        keys, values = zip(self.own, *self.tree_own, strict=True)
        own = (torch.cat(keys, dim=2), torch.cat(values, dim=2))
        keys_BKTD, values_BKTD = (draft_input.cached[name] for name in self.reads)
        cached = (keys_BKTD, values_BKTD)
        hidden_BWH = self.layer(embedded_BWH, rope, own, cached, own_visibility, target_visibility)
        return self.target.lm_head(hidden_BWH)

    def commit(self, path_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """The window moves on over the nodes that became text; the rest of the tree is forgotten."""
        assert self.own is not None
        keys, values = zip(self.own, *self.tree_own, strict=True)
        old, longest = self.own[0].shape[2], path_BE.shape[1]
        width = min(self.window, old + longest)
        # Place in what each row holds now, the old window and then its path; the newest `width` of that are kept.
        place_BP = (old + kept_B + 1 - width)[:, None] + torch.arange(width, device=kept_B.device)
        node_BP = path_BE.gather(1, (place_BP - old).clamp(0, longest - 1))
        source_BP = torch.where(place_BP < old, place_BP.clamp_min(0), old + node_BP)
        self.own = (_pick(torch.cat(keys, dim=2), source_BP), _pick(torch.cat(values, dim=2), source_BP))
        self.tree_own = []

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        assert self.own is not None
        self.own = (self.own[0][rows_B], self.own[1][rows_B])

    def _take_in_level(self, draft_input: DraftInput, builder: TreeBuilder) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Add the newest level's keys and values; its embeddings [B, W, H] and rotations."""
        positions_B1 = draft_input.lengths_B[:, None] + (len(builder.sizes) - 1)
        embedded_BWH, rope, own = self._take_in(builder.tokens[-1], positions_B1.expand_as(builder.tokens[-1]))
        self.tree_own.append(own)
        return embedded_BWH, rope

    def _take_in(self, tokens_BW: Tensor, positions_BW: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Embeddings [B, W, H], rotations, and the draft's own keys and values [B, K, W, D]."""
        embedded_BWH = self.target.model.embed_tokens(tokens_BW)
        rope = self.target.model.rotary_emb(embedded_BWH, positions_BW)
        return embedded_BWH, rope, self.layer.own_keys_values(embedded_BWH, rope)


def _pick(x_BKTD: Tensor, source_BP: Tensor) -> Tensor:
    """The named tokens of each row, [B, K, P, D]."""
    return x_BKTD.gather(2, source_BP[:, None, :, None].expand(-1, x_BKTD.shape[1], -1, x_BKTD.shape[3]))
