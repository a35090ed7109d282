"""Trees by a budget: which nodes are taken, and when no further level is drafted."""

from itertools import product
from math import exp, inf, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspec.decode.budget import calibrated, grown, out_of_slots
from longspec.decode.levels import Budget
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import NOTHING, DraftTree, TreeBuilder
from tests.decode.models import DEPTHS, METHODS, make_drafter, make_target

ROWS, TOKENS, DEPTH = 3, 4, 4
ALL = {"step": 0.0, "node": 0.0}


class Markov:
    """A draft whose next token depends on the last one alone, or, in a block, on its depth; later rows are sharper."""

    def __init__(self, in_blocks: bool) -> None:
        self.in_blocks, self.asked = in_blocks, 0
        sharp_R = torch.arange(1, ROWS + 1)[:, None, None]
        self.log_q_RXV = (sharp_R * torch.randn(ROWS, max(DEPTH, TOKENS), TOKENS)).log_softmax(-1)

    def tree(self, budget: Budget) -> DraftTree:
        builder, self.asked = TreeBuilder(torch.zeros(ROWS, dtype=torch.int64)), 0
        if self.in_blocks:
            return out_of_slots(builder, budget, Sampler(), self.log_q_RXV)
        return grown(builder, budget, Sampler(), lambda: self.after(builder.tokens[-1]))

    def after(self, tokens_RW: Tensor) -> Tensor:
        self.asked += 1
        return self.log_q_RXV.gather(1, tokens_RW[:, :, None].expand(-1, -1, TOKENS))

    def score(self, row: int, path: tuple[int, ...]) -> float:
        above = range(len(path)) if self.in_blocks else (0, *path)
        return sum(float(self.log_q_RXV[row, last, token]) for last, token in zip(above, path, strict=False))


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Return the path to each node that is there; its parents are nodes of the tree, one level above."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.tokens_BS.shape[1]):
        token, parent = int(tree.tokens_BS[row, node]), int(tree.parents_BS[row, node])
        if token != NOTHING:
            found[node] = (*found[parent], token)
            assert tree.depths_S[node] == len(found[node])
            above = {each for each, path in found.items() if path == found[node][: len(path)]}
            assert set(tree.seen_BSS[row, node].nonzero()[:, 0].tolist()) == above
    return list(found.values())[1:]


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_nodes_are_the_likeliest_of_all_paths(in_blocks: bool) -> None:
    """By enumeration, in rows whose trees are of other forms; and those of a price are the ones that are worth it."""
    torch.manual_seed(3)
    draft = Markov(in_blocks)
    every = [path for depth in range(1, DEPTH + 1) for path in product(range(TOKENS), repeat=depth)]
    for budget in (Budget(1, DEPTH, **ALL), Budget(9, DEPTH, **ALL), Budget(30, 3, **ALL), Budget(30, DEPTH, 0.0, 0.1)):
        tree = draft.tree(budget)
        least = log(budget.node) if budget.node else -inf
        for row in range(ROWS):
            found = paths_of(tree, row)
            scores = sorted((draft.score(row, path) for path in every if len(path) <= budget.depth), reverse=True)
            wanted = [score for score in scores[: budget.nodes] if score >= least]
            assert sorted((draft.score(row, path) for path in found), reverse=True) == pytest.approx(wanted)  # paths may tie
            assert len(set(found)) == len(found)


def test_a_level_is_drafted_while_its_parents_are_likely_enough() -> None:
    """A draft that is sure of each token is asked as often as it may be, one that knows nothing twice."""
    draft = Markov(False)
    for share, asked in ((0.99, DEPTH), (0.25, 2)):
        draft.log_q_RXV = torch.full((ROWS, TOKENS, TOKENS), (1 - share) / (TOKENS - 1)).log()
        draft.log_q_RXV[:, :, 1] = torch.tensor(share).log()
        assert (draft.tree(Budget(9, DEPTH, step=0.6)).depth, draft.asked) == (asked, asked)


def test_a_power_is_learnt_under_which_as_much_is_kept_as_was_promised() -> None:
    """Of a draft with the third root of what is kept the power is 3, of one with the square a half; 1 stays."""
    for power in (1.0, 3.0, 0.5):
        numbers, budget, found = np.random.default_rng(0), Budget(4), []
        for _ in range(3000):
            kept_V = numbers.dirichlet(np.full(8, 0.5))
            q_V = kept_V ** (budget.power / power)
            path = [0, 1] if numbers.random() < kept_V.max() else [0]
            budget = calibrated(budget, [[float(q_V.max() / q_V.sum()), 0.0]], [path])
            found.append(budget.power)
        assert np.mean(np.log(found[300:])) == pytest.approx(log(power), abs=0.1)


def test_prompt_lookup_keeps_no_promise_and_a_power_under_which_no_node_stands_rises_again() -> None:
    assert calibrated(Budget(4), [[0.5, 0.0]], [[0, 2, 3]]).power == pytest.approx(exp(-0.5))
    for power, after in ((0.25, 0.5), (4.0, 4.0)):
        assert calibrated(Budget(4, power=power), [[0.0, 0.0]], [[0]]).power == after


def test_tokens_that_top_p_leaves_out_are_no_nodes() -> None:
    builder = TreeBuilder(torch.zeros(1, dtype=torch.int64))
    tree = out_of_slots(builder, Budget(6, 2, **ALL), Sampler(1.0, top_k=1), torch.randn(1, 2, TOKENS))
    assert tree.promised == [[pytest.approx(1), pytest.approx(1), 0]]
    assert (tree.tokens_BS[0, 1:] != NOTHING).all()


@pytest.mark.parametrize("method", METHODS)
def test_rounds_learn_from_those_before(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(2, **DEPTHS[method])
    drafter, propose, powers = make_drafter(method, target), type(make_drafter(method, target)).propose, []

    def recorded(self: Any, given: Any, levels: Any, sampler: Sampler) -> DraftTree:
        tree: DraftTree = propose(self, given, levels, sampler)
        powers.append((levels.power, tree.promised))
        return tree

    monkeypatch.setattr(type(drafter), "propose", recorded)
    speculate(target, drafter, [[3, 1, 4], [5, 9]], max_new_tokens=20, shape=Budget(6, **ALL))
    assert powers[0][0] == 1 != powers[1][0]
    for _, promised in powers:
        assert all(0 <= each <= 1 + 1e-6 for row in promised for each in row)
