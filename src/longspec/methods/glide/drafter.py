"""Draft chains and trees with GLIDE (LongSpec 3.3), with its own cache that holds at most its window.

Shapes: B rows, W tokens taken in at once, P cached tokens of the window, S nodes of a tree with its root, E tokens of a path,
H hidden width, K key/value heads, D head width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.decode.budget import grown
from longspec.decode.cache import KeysValues, NewestTokens
from longspec.decode.drafters import Drafter, DraftInput, check_beside
from longspec.decode.levels import Budget, Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftToTarget, DraftTree, TreeBuilder
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.glide.layer import GlideLayer
from longspec.methods.glide.settings import Draft
from longspec.models.attention.visibility import TreeVisibility
from longspec.models.draft_attention import rotations
from longspec.models.target import draft_device, whole
from longspec.states.tensors import KEYS, VALUES


class GlideDrafter(Drafter):
    """Propose tokens with a draft layer and its target. When sampling, chains are drawn from the draft; trees are beams.

    vocabulary: the tokens to propose; only their rows of the target's head are then computed; None: all tokens.
    """

    def __init__(self, target: Any, layer: GlideLayer, window: int, vocabulary: DraftVocabulary | None = None) -> None:
        self.target, self.layer, self.window = target, layer, window
        self.draft_to_target: DraftToTarget | None = None
        self.head_VH: Tensor | None = None
        if vocabulary is not None:
            ids_V, head_TH = torch.tensor(vocabulary.ids, device=draft_device(target)), whole(target.lm_head.weight.detach())
            self.draft_to_target, self.proposed = DraftToTarget(ids_V, vocabulary.size), len(ids_V)
            self.head_VH = head_TH[ids_V.to(head_TH.device)].to(ids_V.device)
        last = target.config.num_hidden_layers - 1
        self.reads = (f"{KEYS}{last}", f"{VALUES}{last}")
        self.own = NewestTokens(window)  # of the tokens before the root, and of the last proposed tree
        self.root: tuple[Tensor, Tensor] | None = None  # of the last tree: tokens and positions, [B] each

    def check(self, target: Any) -> None:
        """Raise ValueError for another target than its own, and if the layer is on another device or of another dtype."""
        check_beside(self.target, target, self.layer.self_attn.q_proj.weight)
        if self.head_VH is not None:
            check_beside(self.target, target, self.head_VH, "rows of the head")

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Compute keys and values of each prompt's last `window` tokens."""
        width, device = min(self.window, max(map(len, prompts))), draft_device(self.target)
        newest = [[0] * (width - len(prompt)) + prompt[max(0, len(prompt) - width) :] for prompt in prompts]
        first_B1 = torch.tensor([[len(prompt) - width] for prompt in prompts], device=device)
        positions_BW = (first_B1 + torch.arange(width, device=device)).clamp_min(0)
        self.own = NewestTokens(self.window)
        self.own.text = self._take_in(torch.tensor(newest, device=device), positions_BW)[2]

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return a tree of this shape; nothing is computed for its leaves."""
        builder = TreeBuilder(draft_input.roots_B, self.draft_to_target)
        self.own.nodes, self.root = [], (draft_input.roots_B, draft_input.lengths_B)
        return grown(builder, shape, sampler, lambda: self.logits(draft_input, builder))

    def logits(self, draft_input: DraftInput, builder: TreeBuilder) -> Tensor:
        """Return the draft's logits of the token after each node of the newest level, [B, W, V] over what it can propose.

        A node at depth d sees all of the target's cache, which ends d + 1 tokens before it: the lag d + 1 of training.
        """
        positions_B1 = draft_input.lengths_B[:, None] + (len(builder.sizes) - 1)
        embedded_BWH, rope, new = self._take_in(builder.tokens[-1], positions_B1.expand_as(builder.tokens[-1]))
        own, size, depths_S = self.own.with_nodes(new), builder.sizes[-1], builder.depths_S
        own_visibility = draft_input.visibility(builder, self.own.first_B(draft_input.lengths_B), self.window)
        nothing_BW0, depths_W = builder.seen_BSS[:, -size:, :0], depths_S[-size:]
        target_visibility = TreeVisibility(draft_input.lengths, draft_input.lengths_B, nothing_BW0, depths_W, depths_W[:0])
        cached = (draft_input.cached[self.reads[0]], draft_input.cached[self.reads[1]])
        hidden_BWH = self.layer(embedded_BWH, rope, own, cached, own_visibility, target_visibility)
        if self.head_VH is None:
            return self.target.lm_head(hidden_BWH).to(hidden_BWH.device)
        return F.linear(hidden_BWH, self.head_VH)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Move the window on over the root and the drafted tokens that became text; the tree is forgotten."""
        assert self.root is not None
        roots_B, lengths_B = self.root
        text_BE = torch.cat([roots_B[:, None], tokens_BE[:, :-1]], dim=1).clamp_min(0)  # -1 occurs only after the kept tokens
        positions_BE = lengths_B[:, None] + torch.arange(text_BE.shape[1], device=text_BE.device)
        self.own.extend(self._take_in(text_BE, positions_BE)[2], kept_B + 1)

    def select(self, rows_B: Tensor) -> None:
        """Keep these rows alone."""
        self.own.select(rows_B)

    def _take_in(self, tokens_BW: Tensor, positions_BW: Tensor) -> tuple[Tensor, KeysValues, KeysValues]:
        """Return embeddings [B, W, H], rotations, and the draft's own keys and values [B, K, W, D]."""
        embedded_BWH = self.target.model.embed_tokens(tokens_BW).to(tokens_BW.device)
        rope = rotations(self.target.model, embedded_BWH, positions_BW)
        return embedded_BWH, rope, self.layer.own_keys_values(embedded_BWH, rope)


def drafter(target: Any, layer: GlideLayer, settings: Draft, vocabulary: DraftVocabulary | None) -> GlideDrafter:
    """Return the drafter of trees and chains; its head is the target's, or the chosen rows of it."""
    return GlideDrafter(target, layer, settings.window, vocabulary)
