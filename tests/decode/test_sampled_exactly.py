"""Sampled text has the target's own distribution: a test of fit on the joint law of the first three tokens."""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from longspec.decode import lookup, verify
from longspec.decode.levels import Budget
from longspec.decode.lookup import WithLookup
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import NOTHING, DraftToTarget, TreeBuilder
from tests.decode.models import DEPTHS, SMALL, make_drafter, make_target

pytestmark = pytest.mark.slow  # half a minute and more as a whole

CONTINUATIONS, ROWS, PROMPT, VOCABULARY, CHAIN = 8_000, 4_000, [3, 1, 4], 10, 4
BUDGET = Budget(5, 2, 0.0, 0.0)
TREE = (3, 2)  # what is drafted deeper lies behind the three tokens that are compared
LEVEL, WRONG = 1e-3, 1e-6  # a right rule fails the test this rarely; a wrong one's p-value must lie below
WARPS = {"plain": {}, "warped": {"top_k": 6, "top_p": 0.85}}
SAID = (0, 2, 3, 5, 6, 9)  # a draft vocabulary


def make_pair(method: str = "glide", ids: tuple[int, ...] | None = None):
    """A target over ten tokens whose law depends on what came before, and an unlike draft."""
    target = make_target(5, **SMALL | DEPTHS[method], num_key_value_heads=1)
    return target, make_drafter(method, target, 4, ids, 0.5)


@torch.inference_mode()
def joint_law(target, sampler: Sampler) -> Tensor:
    """p(a, b, c) by enumeration, [V, V, V]."""
    tokens_V = torch.arange(VOCABULARY)
    pairs_XT = torch.cat([torch.tensor([PROMPT]).expand(VOCABULARY**2, -1), torch.cartesian_prod(tokens_V, tokens_V)], dim=1)
    p_XTV = sampler.log_probabilities(target(pairs_XT).logits.flatten(0, 1)).exp().unflatten(0, pairs_XT.shape)
    p_abTV = p_XTV.unflatten(0, (VOCABULARY, VOCABULARY))
    last = len(PROMPT) - 1
    return p_abTV[0, 0, last][:, None, None] * p_abTV[:, 0, last + 1][:, :, None] * p_abTV[:, :, last + 2]


def p_value(counts: Tensor, law: Tensor) -> float:
    """Pearson's chi-square test; cells that expect fewer than five are put together, impossible cells must be empty."""
    counts, expected = counts.flatten().double(), law.flatten() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    if expected[rare].sum() < 5:
        rare[expected.masked_fill(rare, torch.inf).argmin()] = True
    counts, expected = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (counts, expected))
    assert len(expected) > 50, "the law has too few outcomes to tell rules apart"
    return float(chisquare(counts, expected).pvalue)


def drawn_p_value(shape, warp: dict, method: str = "glide", ids: tuple[int, ...] | None = None, copied: int = 0) -> float:
    """Of so many continuations."""
    target, drafter = make_pair(method, ids)
    drafter = WithLookup(drafter, copied) if copied else drafter
    generator = torch.Generator().manual_seed(11)
    counts = torch.zeros(VOCABULARY**3)
    for _ in range(CONTINUATIONS // ROWS):
        settings = {"max_new_tokens": 3, "shape": shape, "temperature": 0.9, "generator": generator} | warp
        decoded = speculate(target, drafter, [PROMPT] * ROWS, **settings)
        ids_B3 = torch.tensor([row.ids for row in decoded.rows])
        counts += torch.bincount((ids_B3 * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1), minlength=VOCABULARY**3)
    return p_value(counts, joint_law(target, Sampler(0.9, **warp)))


@pytest.mark.parametrize(
    ("method", "ids", "shape", "warp"),
    [
        ("glide", None, CHAIN, "warped"),
        ("glide", None, TREE, "warped"),
        ("glide", SAID, CHAIN, "plain"),
        ("eagle3", SAID, CHAIN, "warped"),
        ("eagle3", None, TREE, "plain"),
        ("glide", SAID, BUDGET, "warped"),
        ("eagle3", SAID, BUDGET, "plain"),
        ("dflash", None, BUDGET, "warped"),
        ("dflash", SAID, CHAIN, "plain"),
        ("dflash", None, CHAIN, "warped"),
    ],
)
def test_the_first_three_tokens_have_the_targets_joint_law(method: str, ids, shape, warp: str) -> None:
    """With a draft vocabulary other tokens come too: the draft says them with probability 0."""
    assert drawn_p_value(shape, WARPS[warp], method, ids) > LEVEL


@pytest.mark.parametrize(("method", "shape"), [("glide", TREE), ("dflash", (2,))])
def test_they_have_it_with_tokens_of_prompt_lookup(method: str, shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied behind a single token, so that most rows have some."""
    monkeypatch.setattr(lookup, "SHORTEST", 1)
    assert drawn_p_value(shape, {}, method, copied=2) > LEVEL


def by_node_number(logits_BV, tree, node_B, sampler):
    """Wrong: a child stays with the probability of the token whose id is the child's number in the tree."""
    p_BV, nodes = sampler.log_probabilities(logits_BV).exp(), tree.tokens_BS.shape[1]
    u_BS = torch.rand(len(node_B), nodes, generator=sampler.generator)
    stays_BS = (tree.parents_BS == node_B[:, None]) & (u_BS < p_BV[:, torch.arange(nodes) % VOCABULARY])
    child_B = torch.where(stays_BS.any(-1), stays_BS.int().argmax(-1), NOTHING)
    kept_B = tree.tokens_BS.gather(1, child_B.clamp_min(0)[:, None])[:, 0]
    return torch.where(child_B == NOTHING, sampler.draw(p_BV), kept_B), child_B


def no_residual(logits_BV, tree, node_B, sampler):
    """Wrong: a drawn token is tested, and after a rejection the next one comes from p, not from what p has left."""
    token_B, child_B = RIGHT_FOR_CHAINS(logits_BV, tree, node_B, sampler)
    return torch.where(child_B == NOTHING, sampler.choose(logits_BV), token_B), child_B


RIGHT_FOR_CHAINS = verify._drawn


@pytest.mark.parametrize(("shape", "rule"), [(CHAIN, no_residual), (TREE, by_node_number)])
def test_a_wrong_rule_fails_the_same_test(shape, rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test can tell."""
    monkeypatch.setattr(verify, "_drawn" if shape == CHAIN else "_chosen", rule)
    assert drawn_p_value(shape, {}) < WRONG


def smallest_outside(self, q_BV):
    """Wrong: what the draft cannot say is taken to be said as seldom as what it says least."""
    least_B1 = q_BV.min(-1, keepdim=True).values
    return least_B1.expand(-1, self.size).index_copy(1, self.ids_V, q_BV)


def renormalised(self, q_BV):
    """Wrong: q sums to the draft's share of the vocabulary, as if the rest of it lay outside."""
    return RIGHT_OVER_TARGET(self, q_BV) * len(self.ids_V) / self.size


RIGHT_OVER_TARGET = DraftToTarget.over_target


@pytest.mark.parametrize(("method", "rule"), [("glide", smallest_outside), ("eagle3", renormalised)])
def test_a_wrong_distribution_over_a_draft_vocabulary_fails_the_same_test(
    method: str, rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chains. Trees are chosen, and their rule asks for no q."""
    monkeypatch.setattr(DraftToTarget, "over_target", rule)
    assert drawn_p_value(CHAIN, {}, method, SAID) < WRONG


def test_tokens_of_a_draft_vocabulary_are_the_targets() -> None:
    """Chosen and drawn: children are target tokens, and q over the target's vocabulary is 0 outside, by enumeration."""
    log_q_BWV = torch.tensor([[[0.5, 0.1, 0.4]], [[0.2, 0.7, 0.1]]]).log()
    draft_to_target, roots_B = DraftToTarget(torch.tensor([1, 4, 6]), 8), torch.tensor([7, 7])
    chosen = TreeBuilder(roots_B, draft_to_target)
    chosen.grow_all((2,), Sampler(), lambda: log_q_BWV)
    assert chosen.tokens[1].tolist() == [[1, 6], [4, 1]]
    drawn = TreeBuilder(roots_B, draft_to_target)
    drawn.grow_all((1,), Sampler(1.0), lambda: log_q_BWV)
    wanted_BV = torch.tensor([[0, 0.5, 0, 0, 0.1, 0, 0.4, 0], [0, 0.2, 0, 0, 0.7, 0, 0.1, 0]])
    torch.testing.assert_close(drawn.tree().drawn_BSV[:, 1], wanted_BV)
    assert all(wanted_V[token] > 0 for wanted_V, token in zip(wanted_BV, drawn.tokens[1][:, 0], strict=True))
