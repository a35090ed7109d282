"""Draft trees by a budget: the likeliest nodes by the product of the draft's probabilities.

A child's product is at most its parent's, so the likeliest nodes include the parents of all of them. The host chooses them,
which waits for the device once a level.

Shapes: B rows, W nodes of a level, C their likeliest children, K tokens of a slot, D slots, V draft vocabulary.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import exp, log
from statistics import fmean
from sys import float_info
from typing import NamedTuple

import torch
from torch import Tensor

from longspec.decode.levels import Budget, Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import NOTHING, DraftTree, TreeBuilder

GAIN = 0.1  # how fast the power follows what is kept beyond the promise; faster in the first rounds


class Node(NamedTuple):
    """Hold a drafted token: the log-probability of its path, its depth, and its parent's number in the row."""

    score: float
    depth: int
    parent: int
    token: int


ROOT = Node(0.0, 0, NOTHING, NOTHING)


def grown(builder: TreeBuilder, shape: Levels | Budget, sampler: Sampler, logits: Callable[[], Tensor]) -> DraftTree:
    """Return the tree of this shape. logits: returns what may follow each node of the builder's newest level, [B, W, V].

    For a budget the builder holds only the nodes whose children were asked for. A level is drafted while the nodes to ask are
    likely enough, in sum over a row, that their children pay for it.
    """
    if not isinstance(shape, Budget):
        builder.grow_all(shape, sampler, logits)
        return builder.tree()
    rows = [[ROOT] for _ in builder.tokens[0]]
    asked = 0  # number in each row of the newest level's first node
    for depth in range(1, shape.depth + 1):
        logits_BWV = logits()
        size = min(shape.nodes, logits_BWV.shape[1] * logits_BWV.shape[2])
        scores_BC, parents_BC, tokens_BC = sampler.agreed(builder.likeliest(logits_BWV * shape.power, size, sampler))
        first = len(rows[0])
        for row, *found in zip(rows, scores_BC.tolist(), parents_BC.tolist(), tokens_BC.tolist(), strict=True):
            row += [Node(score, depth, asked + int(parent), int(token)) for score, parent, token in zip(*found, strict=True)]
        # Children are sorted by their scores, so the ones to ask come first in every row.
        open_ones = [[row[number].score for number in _best(row, shape) if number >= first] for row in rows]
        width, asked = max(map(len, open_ones)), first
        if not width or sum(exp(score) for row in open_ones for score in row) < shape.step * len(rows):
            break
        builder.add(parents_BC[:, :width].long(), tokens_BC[:, :width].long())
        builder.scores_BW = scores_BC[:, :width]
    return _tree(rows, builder.tokens[0], shape)


def out_of_slots(builder: TreeBuilder, budget: Budget, sampler: Sampler, logits_BDV: Tensor) -> DraftTree:
    """Return the tree of a block, whose slots do not know each other's tokens: best first, without a further forward.

    A path goes on with the next slot's likeliest token, or with the next likeliest one of its own slot.
    """
    logits_BDV = logits_BDV[:, : budget.depth] * budget.power
    log_q_BDV = sampler.log_probabilities(logits_BDV.flatten(0, 1)).unflatten(0, (len(logits_BDV), -1))
    best_BDK, tokens_BDK = log_q_BDV.topk(min(budget.nodes, log_q_BDV.shape[-1]), dim=-1)
    best_BDK, tokens_BDK = sampler.agreed(torch.stack([best_BDK, builder.of_target(tokens_BDK)]))
    rows = []
    for best, tokens in zip(best_BDK.tolist(), tokens_BDK.tolist(), strict=True):
        row, heap = [ROOT], [(-best[0][0], 1, 0, 0)]
        while heap and len(row) <= budget.nodes:
            cost, depth, parent, rank = heappop(heap)
            row.append(Node(-cost, depth, parent, int(tokens[depth - 1][rank])))
            if rank + 1 < len(best[0]):
                above = row[parent].score + best[depth - 1][rank + 1]
                heappush(heap, (-above, depth, parent, rank + 1))
            if depth < len(best):
                heappush(heap, (cost - best[depth][0], depth + 1, len(row) - 1, 0))
        rows.append(row)
    return _tree(rows, builder.tokens[0], budget)


def _best(row: list[Node], budget: Budget) -> list[int]:
    """Return the numbers of the nodes to keep, the likeliest first; of equally likely ones the parent first."""
    least = log(budget.node) if budget.node else -float_info.max  # -inf, of tokens that top-p leaves out, promises nothing
    numbers = [number for number, node in enumerate(row) if number and node.score >= least]
    return sorted(numbers, key=lambda number: (-row[number].score, row[number].depth))[: budget.nodes]


def _tree(rows: list[list[Node]], roots_B1: Tensor, budget: Budget) -> DraftTree:
    """Return a tree of each row's likeliest nodes, level by level; rows with fewer of them have missing nodes (NOTHING)."""
    kept = [sorted(_best(row, budget), key=lambda number: row[number].depth) for row in rows]
    counts = [Counter(row[number].depth for number in numbers) for row, numbers in zip(rows, kept, strict=True)]
    depths = [depth for depth in range(1, budget.depth + 1) for _ in range(max(count[depth] for count in counts))]
    starts = {depth: place for place, depth in reversed(list(enumerate(depths, 1)))}
    tokens, parents, seen, promised = [], [], [], []
    for row, numbers in zip(rows, kept, strict=True):
        places, following = {0: 0}, dict(starts)
        held, above = [NOTHING] * len(depths), [0] * len(depths)
        promised.append([0.0] * (1 + len(depths)))
        for number in numbers:
            node = row[number]
            place = places[number] = following[node.depth]
            following[node.depth] += 1
            held[place - 1], above[place - 1] = node.token, places[node.parent]
            promised[-1][places[node.parent]] += exp(node.score - row[node.parent].score)
        lines = [[True] + [False] * len(depths)]
        for place, parent in enumerate(above, 1):
            lines.append(lines[parent].copy())
            lines[-1][place] = True
        tokens.append(held)
        parents.append([NOTHING, *above])
        seen.append(lines)
    device = roots_B1.device
    tokens_BS = torch.cat([roots_B1, torch.tensor(tokens, dtype=torch.int64, device=device)], dim=1)
    numbers_BS, seen_BSS = torch.tensor(parents, device=device), torch.tensor(seen, device=device)
    depths_S = torch.tensor([0, *depths], device=device)
    return DraftTree(tokens_BS, numbers_BS, seen_BSS, depths_S, max([0, *depths]), promised=promised)


def calibrated(budget: Budget, promised: list[list[float]], paths: list[list[int]]) -> Budget:
    """Return the budget with a power under which its trees promise as much as is kept.

    A draft learns how likely the target says a token. Greedy text follows the likeliest one, which the target may say seldom.
    promised: for each row's nodes, how likely one of its children is kept; paths: the kept nodes, from the root on; nodes
    behind the promised ones are prompt lookup's.
    """
    errors = [
        (place + 1 < len(path) and path[place + 1] < len(likely)) - likely[node]
        for likely, path in zip(promised, paths, strict=True)
        for place, node in enumerate(path)
        if node < len(likely) and likely[node]
    ]
    if not errors:  # a power that leaves no node would never learn again
        return replace(budget, power=max(budget.power, budget.power**0.5))
    gain = max(GAIN, 1 / (1 + budget.rounds))
    return replace(budget, power=budget.power * exp(gain * fmean(errors)), rounds=budget.rounds + 1)
