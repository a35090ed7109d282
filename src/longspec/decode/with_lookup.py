"""A draft with prompt lookup beside it: what the text holds already is copied, the rest is drafted, in one tree.

Shapes: B rows, S nodes of the draft's tree with its root, L copied tokens, E tokens a round can bring.
"""

from typing import Any

import torch
from torch import Tensor

from longspec.decode.drafters import Drafter, DraftInput, Followers
from longspec.decode.levels import MOST_COPIED, Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree

SHORTEST, LONGEST = 2, 3  # n-grams that are looked up: of a single token what followed it elsewhere seldom follows again


class WithLookup(Drafter):
    """Another drafter, with up to `tokens` tokens beside its tree that followed the text's newest ones where they first stood.

    Chains of which every token was drawn from the draft's distribution, when sampling, stay alone: the rule that keeps them
    asks for the distribution that each token was drawn from.

    Raises ValueError for another number than 1 to MOST_COPIED.
    """

    def __init__(self, drafter: Drafter, tokens: int) -> None:
        if type(tokens) is not int or not 1 <= tokens <= MOST_COPIED:
            raise ValueError(f"prompt_lookup_num_tokens: {tokens!r}: give 1 to {MOST_COPIED}, such as 8, or leave it out")
        self.drafter, self.copied = drafter, tokens
        self.reads, self.proposed, self.acceptance = drafter.reads, drafter.proposed, drafter.acceptance
        self.followers: list[Followers] = []  # of each row

    def check(self, target: Any) -> None:
        """Have the drafter check the target. Raises ValueError as it does."""
        self.drafter.check(target)

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Take the prompts in."""
        self.followers = [Followers(LONGEST) for _ in prompts]
        self.drafter.begin(prompts, hidden)

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """The drafter's tree, and behind it what is copied, from the first token on that the tree does not hold already."""
        tree = self.drafter.propose(draft_input, levels, sampler)
        if tree.drawn_BSV is not None:
            return tree
        copied = []
        for followers, text in zip(self.followers, draft_input.texts, strict=True):
            followers.learn(text)
            copied.append(followers.of(text, self.copied, SHORTEST))
        drafted = torch.stack([tree.tokens_BS, tree.parents_BS], dim=1).tolist()
        paths = [_path_along(nodes, parents, tokens) for (nodes, parents), tokens in zip(drafted, copied, strict=True)]
        longest = max(map(len, copied))
        # Rows share the depths of the nodes, so the branch begins where the first row has something new.
        first = min((len(path) for path, tokens in zip(paths, copied, strict=True) if len(path) < len(tokens)), default=longest)
        if first == longest:
            return tree
        size, parents, branch = tree.tokens_BS.shape[1], [], []
        for path, tokens in zip(paths, copied, strict=True):
            # A row with nothing new may end before the branch begins: it then has nodes that are not there.
            known = path + [0] * (first - len(path))
            above = [0, *known, *range(size + len(known) - first, size + longest - first)]  # of token 0, 1, ...
            parents.append(above[first:longest])
            held = [NOTHING] * len(known) + tokens[len(known) :]
            branch.append((held + [NOTHING] * (longest - len(held)))[first:])
        device = tree.tokens_BS.device
        return tree.with_branch(torch.tensor(parents, device=device), torch.tensor(branch, device=device), first + 1)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Hand the tokens on to the drafter."""
        self.drafter.commit(tokens_BE, kept_B, hidden)

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        self.followers = [self.followers[row] for row in rows_B.tolist()]
        self.drafter.select(rows_B)


def _path_along(nodes: list[int], parents: list[int], tokens: list[int]) -> list[int]:
    """The nodes of a tree that hold the first of these tokens, one below the other, from the root down."""
    path = [0]
    children = dict(zip(zip(parents, nodes, strict=True), range(len(nodes)), strict=True))
    for token in tokens:
        if (node := children.get((path[-1], token))) is None:
            break
        path.append(node)
    return path[1:]
