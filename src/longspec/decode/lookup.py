"""Prompt lookup: copying what the text holds already, by itself or beside a draft in one tree.

Shapes: B rows, S nodes of the draft's tree with its root, L copied tokens, E tokens a round can bring.
"""

from typing import Any

import torch
from torch import Tensor

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import MOST_COPIED, Budget, Levels, depth_of
from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree, chains

SHORTEST, LONGEST = 2, 3  # lengths of n-grams that are looked up: what followed a single token elsewhere seldom follows again


class Followers:
    """Map each n-gram of up to LONGEST tokens of a growing text to the place behind its first occurrence."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its first one
        self.behind = 1  # the first place for which the n-grams before it are not known yet

    def learn(self, text: list[int]) -> None:
        """Take in what the text has grown by."""
        for size in range(1, LONGEST + 1):
            first = max(0, self.behind - size)
            grams = zip(*(text[first + offset : -1] for offset in range(size)), strict=False)
            for place, gram in enumerate(grams, first + size):
                self.known.setdefault(gram, place)
        self.behind = len(text)

    def of(self, text: list[int], count: int, shortest: int = 1) -> list[int]:
        """Take the text in; return up to `count` tokens that followed the longest n-gram (`shortest` or more) at its end."""
        self.learn(text)
        for size in range(min(LONGEST, len(text) - 1), shortest - 1, -1):
            place = self.known.get(tuple(text[-size:]))
            if place is not None:
                return text[place : place + count]
        return []


class LookupDrafter(Drafter):
    """Propose what followed the newest n-gram where it first stood in the text, as transformers' own generator does."""

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Begin with nothing learnt; the first round learns the prompts, each further round what it adds."""
        self.followers = [Followers() for _ in prompts]  # of each row

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return a chain of what followed an earlier match, at most as deep as the shape; empty without a match."""
        found = [each.of(text, depth_of(shape)) for each, text in zip(self.followers, draft_input.texts, strict=True)]
        longest = max(map(len, found))
        filled = [chain + [NOTHING] * (longest - len(chain)) for chain in found]
        return chains(draft_input.roots_B, torch.tensor(filled, dtype=torch.int64, device=draft_input.roots_B.device))

    def select(self, rows_B: Tensor) -> None:
        self.followers = [self.followers[row] for row in rows_B.tolist()]


class WithLookup(Drafter):
    """Add to another drafter's tree up to `tokens` (1 to MOST_COPIED) tokens that followed the text's newest ones before.

    When sampling, chains whose tokens were all drawn from the draft's distribution stay alone: the rule that keeps them needs
    the distribution of each token.
    """

    def __init__(self, drafter: Drafter, tokens: int) -> None:
        if type(tokens) is not int or not 1 <= tokens <= MOST_COPIED:
            raise ValueError(f"prompt_lookup_num_tokens: {tokens!r}: give 1 to {MOST_COPIED}, such as 8, or leave it out")
        self.drafter, self.copied = drafter, tokens
        self.reads, self.proposed, self.acceptance = drafter.reads, drafter.proposed, drafter.acceptance

    def check(self, target: Any) -> None:
        self.drafter.check(target)

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        self.followers = [Followers() for _ in prompts]  # of each row
        self.drafter.begin(prompts, hidden)

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        """Return the drafter's tree, with a branch of what is copied, from the first token on that the tree does not hold."""
        tree = self.drafter.propose(draft_input, shape, sampler)
        if tree.drawn_BSV is not None:
            return tree
        copied = [each.of(text, self.copied, SHORTEST) for each, text in zip(self.followers, draft_input.texts, strict=True)]
        drafted = torch.stack([tree.tokens_BS, tree.parents_BS], dim=1).tolist()
        paths = [_path_along(nodes, parents, tokens) for (nodes, parents), tokens in zip(drafted, copied, strict=True)]
        longest = max(map(len, copied))
        # Rows share the depths of the nodes, so the branch begins where the first row has something new.
        first = min((len(path) for path, tokens in zip(paths, copied, strict=True) if len(path) < len(tokens)), default=longest)
        if first == longest:
            return tree
        size, parents, branch = tree.tokens_BS.shape[1], [], []
        for path, tokens in zip(paths, copied, strict=True):
            # A row with nothing new may end before the branch begins: then some of its nodes are missing (NOTHING).
            known = path + [0] * (first - len(path))
            above = [0, *known, *range(size + len(known) - first, size + longest - first)]  # of token 0, 1, ...
            parents.append(above[first:longest])
            held = [NOTHING] * len(known) + tokens[len(known) :]
            branch.append((held + [NOTHING] * (longest - len(held)))[first:])
        device = tree.tokens_BS.device
        return tree.with_branch(torch.tensor(parents, device=device), torch.tensor(branch, device=device), first + 1)

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        self.drafter.commit(tokens_BE, kept_B, hidden)

    def select(self, rows_B: Tensor) -> None:
        self.followers = [self.followers[row] for row in rows_B.tolist()]
        self.drafter.select(rows_B)


def _path_along(nodes: list[int], parents: list[int], tokens: list[int]) -> list[int]:
    """Return the tree's nodes that hold the first of these tokens, one below the other, from the root down."""
    path = [0]
    children = dict(zip(zip(parents, nodes, strict=True), range(len(nodes)), strict=True))
    for token in tokens:
        if (node := children.get((path[-1], token))) is None:
            break
        path.append(node)
    return path[1:]
