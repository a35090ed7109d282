"""Which drafted tokens stay: rules under which the text is drawn from the target's own distribution.

Shapes: B rows, S nodes of a tree with its root, E = depth + 1 tokens a round can bring, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree


@dataclass
class Acceptance:
    """Hold for each row the path of nodes from the root, the number of kept drafted tokens, and the tokens after the root.

    Valid are path_BE[b, : kept_B[b] + 1] and tokens_BE[b, : kept_B[b] + 1]: the kept tokens and one of the target's own.
    """

    path_BE: Tensor
    kept_B: Tensor
    tokens_BE: Tensor

    def agreed(self, sampler: Sampler) -> "Acceptance":
        """Return rank 0's acceptance, on all ranks that hold the target."""
        return Acceptance(*map(sampler.agreed, (self.path_BE, self.kept_B, self.tokens_BE)))


def verify_tree(logits_BSV: Tensor, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Walk down from the root by the rule that fits how the tree was made, without a transfer to the host.

    logits_BSV: the target's, after each node.
    """
    if tree.is_chain and tree.drawn_BSV is None:
        return _along_chain(logits_BSV, tree, sampler)
    if sampler.greedy:
        return _along_tree(logits_BSV, tree, sampler)
    rule = _chosen if tree.drawn_BSV is None else _drawn
    node_B = torch.zeros_like(tree.tokens_BS[:, 0])
    kept_B, rows_B = torch.zeros_like(node_B), torch.arange(len(node_B), device=node_B.device)
    alive_B = torch.ones_like(node_B, dtype=torch.bool)
    path, tokens = [], []
    for _ in range(tree.depth + 1):
        token_B, child_B = rule(logits_BSV[rows_B, node_B], tree, node_B, sampler)
        path.append(node_B)
        tokens.append(token_B)
        alive_B = alive_B & (child_B != NOTHING)
        kept_B = kept_B + alive_B
        node_B = torch.where(alive_B, child_B, node_B)
    return Acceptance(torch.stack(path, dim=1), kept_B, torch.stack(tokens, dim=1))


def _chosen(logits_BV: Tensor, tree: DraftTree, node_B: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Return the target's next token, and the child that holds it or NOTHING; for children that were chosen, or greedy text.

    The token is drawn from the target's distribution p before it is compared with the children. They do not depend on the draw,
    so each token of the text has law p whatever the tree is. No exact rule keeps more: the emitted token has law p and is a
    child with probability p(children), which is how often this rule goes down. (To try the children one by one, each accepted
    by what p has left, gives the same law with more draws.)
    """
    token_B = sampler.choose(logits_BV)
    matches_BS = (tree.parents_BS == node_B[:, None]) & (tree.tokens_BS == token_B[:, None])
    return token_B, torch.where(matches_BS.any(-1), matches_BS.int().argmax(-1), NOTHING)


def _along_chain(logits_BSV: Tensor, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Follow the rule of _chosen for a chain, at all of its nodes at once: find how far the target's tokens are the chain's."""
    tokens_BE = sampler.choose(logits_BSV.flatten(0, 1)).unflatten(0, logits_BSV.shape[:2])
    kept_B = (tree.tokens_BS[:, 1:] == tokens_BE[:, :-1]).cumprod(dim=1).sum(dim=1)
    return Acceptance(tree.depths_S.expand_as(tokens_BE), kept_B, tokens_BE)


def _along_tree(logits_BSV: Tensor, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Follow the rule of _chosen greedily, at all nodes at once: one stays if it and all above it are the target's tokens."""
    tokens_BS = sampler.choose(logits_BSV.flatten(0, 1)).unflatten(0, logits_BSV.shape[:2])
    said_BS = tokens_BS.gather(1, tree.parents_BS.clamp_min(0)) == tree.tokens_BS
    said_BS[:, 0] = True  # the root
    stays_BS = (said_BS[:, None] | ~tree.seen_BSS).all(dim=-1)
    deepest_B = (stays_BS * (tree.depths_S + 1)).argmax(dim=-1)
    above_BS = tree.seen_BSS[torch.arange(len(deepest_B), device=deepest_B.device), deepest_B]
    depths_E1 = torch.arange(tree.depth + 1, device=tokens_BS.device)[:, None]
    path_BE = (above_BS[:, None] & (tree.depths_S == depths_E1)).int().argmax(dim=-1)
    return Acceptance(path_BE, tree.depths_S[deepest_B], tokens_BS.gather(1, path_BE))


def _drawn(logits_BV: Tensor, tree: DraftTree, node_B: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Return the next token and its node, or NOTHING, in a chain drawn from the draft's q (Leviathan et al. 2023, 2.3).

    The drawn x stays with probability min(1, p(x) / q(x)); else a token is drawn from max(0, p - q). Token t then comes with
    min(p(t), q(t)) + max(0, p(t) - q(t)) = p(t). This keeps sum_t min(p(t), q(t)) of the tokens; the draft's best token, if it
    were chosen, would be kept with its p alone. Hence chains are drawn when the target's tokens are.
    """
    assert tree.drawn_BSV is not None
    rows_B = torch.arange(len(node_B), device=node_B.device)
    p_BV = sampler.log_probabilities(logits_BV).exp()
    child_B = (node_B + 1).clamp_max(tree.depth)  # the node of a chain below node n is n + 1
    has_child_B = node_B < tree.depth
    x_B, q_BV = tree.tokens_BS[rows_B, child_B], tree.drawn_BSV[rows_B, child_B]
    u_B = torch.rand(len(node_B), dtype=p_BV.dtype, device=p_BV.device, generator=sampler.generator)
    stays_B = has_child_B & (u_B * q_BV[rows_B, x_B] < p_BV[rows_B, x_B])
    rest_BV = (p_BV - q_BV * has_child_B[:, None]).clamp_min(0)
    # Where p is q to the last bit nothing is left, and x stays but for rounding.
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)
    token_B = torch.where(stays_B, x_B, sampler.draw_own(rest_BV))
    return token_B, torch.where(stays_B, child_B, NOTHING)
