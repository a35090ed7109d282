"""Which drafted tokens stay, greedily: as a walk down the tree by the host says."""

import pytest
import torch

from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree
from longspec.decode.verify import verify_tree

VOCABULARY = 4  # few, so that trees agree with the target often, and siblings with each other


def tree_of(rows: int, levels: list[int], generator: torch.Generator) -> DraftTree:
    """Random tokens below random nodes of the level before, some of them not there."""
    depths = [0, *(depth for depth, size in enumerate(levels, 1) for _ in range(size))]
    tokens_BS = torch.randint(0, VOCABULARY, (rows, len(depths)), generator=generator)
    parents_BS, seen_BSS = torch.full_like(tokens_BS, NOTHING), torch.zeros(rows, len(depths), len(depths), dtype=torch.bool)
    seen_BSS[:, 0, 0] = True
    for row in range(rows):
        for node in range(1, len(depths)):
            above = [place for place, depth in enumerate(depths) if depth == depths[node] - 1]
            parent = above[int(torch.randint(0, len(above), (), generator=generator))]
            parents_BS[row, node] = parent
            seen_BSS[row, node] = seen_BSS[row, parent]
            seen_BSS[row, node, node] = True
            if torch.rand((), generator=generator) < 0.1:
                tokens_BS[row, node] = NOTHING
    return DraftTree(tokens_BS, parents_BS, seen_BSS, torch.tensor(depths), len(levels))


def said(path: list[int], number: int) -> int:
    """What a target says behind these tokens: by the text alone, so the same behind siblings that are equal."""
    return (sum((place + number) * token for place, token in enumerate(path, 3)) + number + len(path)) % VOCABULARY


@pytest.mark.parametrize("levels", [[1, 1, 1], [3, 2, 4], [2, 5], [6], [1, 3, 1, 1]])
def test_what_stays_is_what_a_walk_from_the_root_finds(levels: list[int]) -> None:
    generator, kept = torch.Generator().manual_seed(len(levels)), 0
    for number in range(60):
        tree = tree_of(3, levels, generator)
        paths = [
            [tokens_S[line_S].tolist() for line_S in seen_SS]
            for tokens_S, seen_SS in zip(tree.tokens_BS, tree.seen_BSS, strict=True)
        ]
        says_BS = torch.tensor([[said(path, number) for path in row] for row in paths])
        found = verify_tree(torch.nn.functional.one_hot(says_BS, VOCABULARY).float(), tree, Sampler(0.0))
        for row, (path, tokens) in enumerate((row[0], list[int]()) for row in paths):
            while path in paths[row]:
                tokens.append(said(path, number))
                assert paths[row][found.path_BE[row, len(tokens) - 1]] == path
                path = [*path, tokens[-1]]
            assert int(found.kept_B[row]) == len(tokens) - 1
            assert found.tokens_BE[row, : len(tokens)].tolist() == tokens
            kept += len(tokens) - 1
    assert kept > 30
