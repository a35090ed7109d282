"""Draft trees: the root is the text's newest token; then come levels of nodes, each of one size, then one branch.

Shapes: B rows, S nodes with the root, W nodes of a level, C nodes of the next level, D depth, V vocabulary, T the target's
vocabulary if the draft's is a part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.decode.levels import Levels
from longspec.decode.sampling import Sampler

NOTHING = -1  # the token of a node that is not there, and the parent of the root


@dataclass(frozen=True)
class DraftToTarget:
    """Map the tokens of a draft vocabulary to the target's: token n is the target's ids_V[n], of `size`, T, tokens."""

    ids_V: Tensor
    size: int

    def over_target(self, q_BV: Tensor) -> Tensor:
        """Return a distribution over the draft vocabulary as one over the target's, [B, T]: 0 for tokens outside."""
        return q_BV.new_zeros(len(q_BV), self.size).index_copy(1, self.ids_V, q_BV)


@dataclass
class DraftTree:
    """Hold tokens that may follow each row's root. Node 0 is the root, then come the levels; all rows have the same levels.

    parents_BS: node numbers; seen_BSS[b, s, t]: whether t is s or above it. drawn_BSV: the distribution that each node was
    drawn from, for a chain with all tokens drawn; None: the nodes were chosen. promised: for a tree by a budget, for each row
    and node, how likely one of its children is kept.
    """

    tokens_BS: Tensor
    parents_BS: Tensor
    seen_BSS: Tensor
    depths_S: Tensor
    depth: int  # levels below the root
    drawn_BSV: Tensor | None = None
    promised: list[list[float]] | None = None

    @property
    def is_chain(self) -> bool:
        """Tell whether every level is one node, so that node n is the parent of node n + 1."""
        return self.tokens_BS.shape[1] == self.depth + 1

    def with_branch(self, parents_BL: Tensor, tokens_BL: Tensor, first_depth: int) -> "DraftTree":
        """Return this tree with L more nodes, each one deeper than the last, the first of them `first_depth` below the root.

        parents_BL: for each new node its parent's number in the new tree; parents come before their children.
        """
        old, count = self.tokens_BS.shape[1], tokens_BL.shape[1]
        seen_BSS = F.pad(self.seen_BSS, (0, count, 0, count))
        rows_B = torch.arange(len(seen_BSS), device=seen_BSS.device)
        for node, parents_B in enumerate(parents_BL.unbind(1), old):
            seen_BSS[:, node] = seen_BSS[rows_B, parents_B]
            seen_BSS[:, node, node] = True
        last_depth = first_depth + count - 1
        return DraftTree(
            torch.cat([self.tokens_BS, tokens_BL], dim=1),
            torch.cat([self.parents_BS, parents_BL], dim=1),
            seen_BSS,
            torch.cat([self.depths_S, torch.arange(first_depth, last_depth + 1, device=self.depths_S.device)]),
            max(self.depth, last_depth),
            promised=self.promised,
        )


class TreeBuilder:
    """Grow a tree by one level at a time, from its root on.

    draft_to_target: maps the vocabulary of the draft's distributions; None: it is the target's own.
    """

    def __init__(self, roots_B: Tensor, draft_to_target: DraftToTarget | None = None) -> None:
        self.draft_to_target = draft_to_target
        self.tokens = [roots_B[:, None]]
        self.parents = [torch.full_like(roots_B, NOTHING)[:, None]]
        self.seen_BSS = torch.ones_like(roots_B, dtype=torch.bool)[:, None, None]
        self.sizes = [1]
        self.drawn: list[Tensor] = []
        self.scores_BW = torch.zeros_like(roots_B, dtype=torch.float32)[:, None]  # log-probability of the path to each node

    @property
    def nodes(self) -> int:
        """Return the number of nodes so far, S."""
        return sum(self.sizes)

    @property
    def depths_S(self) -> Tensor:
        """Return the depth of each node; the root's is 0."""
        device = self.tokens[0].device
        return torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(self.sizes)])

    def add(self, parents_BC: Tensor, tokens_BC: Tensor) -> None:
        """Add a level of tokens, as the target numbers them; parents are numbered within the level above."""
        first, size = self.nodes - self.sizes[-1], tokens_BC.shape[1]
        self.tokens.append(tokens_BC)
        self.parents.append(parents_BC + first)
        above_BCS = self.seen_BSS.gather(1, self.parents[-1][:, :, None].expand(-1, -1, self.nodes))
        own_CC = torch.eye(size, dtype=torch.bool, device=tokens_BC.device)
        self.seen_BSS = F.pad(torch.cat([self.seen_BSS, above_BCS], dim=1), (0, size))
        self.seen_BSS[:, -size:, -size:] = own_CC
        self.sizes.append(size)

    def grow_all(self, levels: Levels, sampler: Sampler, logits: Callable[[], Tensor]) -> None:
        """Add all levels. logits: returns what may follow each node of the newest level, [B, W, V].

        When the target's tokens are drawn, chains are drawn from the draft, as verify.py needs; nodes of trees are chosen. A
        greedy chain needs its likeliest tokens only, so that no distribution over the vocabulary is made.
        """
        is_chain = all(size == 1 for size in levels)
        for size in levels:
            logits_BWV = logits()
            if is_chain and sampler.greedy:
                tokens_BC = logits_BWV.argmax(-1)
                parents_BC = torch.zeros_like(tokens_BC)
            else:
                log_q_BWV = sampler.log_probabilities(logits_BWV.flatten(0, 1)).unflatten(0, logits_BWV.shape[:2])
                parents_BC, tokens_BC = self._draw(log_q_BWV, sampler) if is_chain else self._choose(log_q_BWV, size)
            parents_BC, tokens_BC = sampler.agreed(torch.stack([parents_BC, tokens_BC])).unbind()
            self.add(parents_BC, self.of_target(tokens_BC))

    def of_target(self, tokens: Tensor) -> Tensor:
        """Return tokens as the target numbers them."""
        return tokens if self.draft_to_target is None else self.draft_to_target.ids_V[tokens]

    def likeliest(self, logits_BWV: Tensor, size: int, sampler: Sampler) -> Tensor:
        """Return scores, parents and tokens, [3, B, C], of the `size` likeliest children of the newest level by their paths.

        In float64, which holds all three.
        """
        log_q_BWV = sampler.log_probabilities(logits_BWV.flatten(0, 1)).unflatten(0, logits_BWV.shape[:2])
        parents_BC, tokens_BC = self._choose(log_q_BWV, size)
        return torch.stack([each.double() for each in (self.scores_BW, parents_BC, self.of_target(tokens_BC))])

    def _draw(self, log_q_BWV: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
        """Return the parents and next tokens of chains, as the draft numbers them."""
        q_BV = log_q_BWV[:, 0].exp()
        tokens_B1 = sampler.draw(q_BV)[:, None]
        self.drawn.append(q_BV if self.draft_to_target is None else self.draft_to_target.over_target(q_BV))
        return torch.zeros_like(tokens_B1), tokens_B1

    def _choose(self, log_q_BWV: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return parents and tokens of the `size` likeliest children of the newest level, by their whole paths.

        This is a beam of drafts (LongSpec 3.3).
        """
        per_parent = min(size, log_q_BWV.shape[-1])
        best_BWK, tokens_BWK = log_q_BWV.topk(per_parent, dim=-1)
        totals_BX = (self.scores_BW[:, :, None] + best_BWK).flatten(1)
        self.scores_BW, picked_BC = totals_BX.topk(size, dim=-1)
        return picked_BC // per_parent, tokens_BWK.flatten(1).gather(1, picked_BC)

    def tree(self) -> DraftTree:
        """Return the tree as grown so far."""
        drawn_BSV = None
        if self.drawn:  # the root was drawn from nothing
            drawn_BSV = torch.stack([torch.zeros_like(self.drawn[0]), *self.drawn], dim=1)
        tokens_BS, parents_BS = torch.cat(self.tokens, dim=1), torch.cat(self.parents, dim=1)
        return DraftTree(tokens_BS, parents_BS, self.seen_BSS, self.depths_S, len(self.sizes) - 1, drawn_BSV)


def chains(roots_B: Tensor, tokens_BD: Tensor) -> DraftTree:
    """Return one chosen chain per row; NOTHING fills up the shorter ones."""
    tokens_BS = torch.cat([roots_B[:, None], tokens_BD], dim=1)
    depth = tokens_BD.shape[1]
    depths_S = torch.arange(depth + 1, device=roots_B.device)
    seen_SS = depths_S[:, None] >= depths_S
    return DraftTree(tokens_BS, (depths_S - 1).expand_as(tokens_BS), seen_SS.expand(len(roots_B), -1, -1), depths_S, depth)
