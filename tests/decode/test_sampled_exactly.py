"""Sampled text has the target's own distribution: a test of fit on the joint law of the first three tokens."""

import pytest
import torch
from torch import Tensor

from longspec.decode import verify
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import DEFAULT_SHAPE, NOTHING
from longspec.methods.glide.drafter import GlideDrafter
from tests.decode.models import SMALL, make_layer, make_target

CONTINUATIONS, ROWS, PROMPT, VOCABULARY, CHAIN = 20_000, 2_000, [3, 1, 4], 10, 4
LEVEL, WRONG = 1e-3, 1e-6  # a right rule fails the test this rarely; a wrong one's p-value must lie below
WARPS = {"plain": {}, "warped": {"top_k": 6, "top_p": 0.85}}


def make_pair():
    """A target over ten tokens whose law depends on what came before, and an unlike draft."""
    target = make_target(5, **SMALL, num_key_value_heads=1)
    return target, GlideDrafter(target, make_layer(target, 0.5), window=4)


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
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:
        counts = torch.cat([counts[:-2], counts[-2:].sum()[None]])
        expected = torch.cat([expected[:-2], expected[-2:].sum()[None]])
    assert len(expected) > 50, "the law has too few outcomes to tell rules apart"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


def drawn_p_value(shape, warp: dict) -> float:
    """Of 20,000 continuations."""
    target, drafter = make_pair()
    generator = torch.Generator().manual_seed(11)
    counts = torch.zeros(VOCABULARY**3)
    for _ in range(CONTINUATIONS // ROWS):
        settings = {"max_new_tokens": 3, "shape": shape, "temperature": 0.9, "generator": generator} | warp
        decoded = speculate(target, drafter, [PROMPT] * ROWS, **settings)
        ids_B3 = torch.tensor([row.ids for row in decoded.rows])
        counts += torch.bincount((ids_B3 * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1), minlength=VOCABULARY**3)
    return p_value(counts, joint_law(target, Sampler(0.9, **warp)))


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("shape", [CHAIN, DEFAULT_SHAPE, (3, 2)])
def test_the_first_three_tokens_have_the_targets_joint_law(shape, warp: str) -> None:
    assert drawn_p_value(shape, WARPS[warp]) > LEVEL


def by_node_number(logits_BV, tree, node_B, sampler):
    """Wrong: a child stays with the probability of the token whose id is the child's number in the tree."""
    p_BV, nodes = sampler.log_probabilities(logits_BV).exp(), tree.tokens_BS.shape[1]
    u_BS = torch.rand(len(node_B), nodes, generator=sampler.generator)
    stays_BS = (tree.parents_BS == node_B[:, None]) & (u_BS < p_BV[:, torch.arange(nodes) % VOCABULARY])
    child_B = torch.where(stays_BS.any(-1), stays_BS.int().argmax(-1), NOTHING)
    kept_B = tree.tokens_BS.gather(1, child_B.clamp_min(0)[:, None])[:, 0]
    return torch.where(child_B == NOTHING, sampler.draw(p_BV), kept_B), child_B


def always(logits_BV, tree, node_B, sampler):
    """Wrong: the first child stays whatever the target says."""
    children_BS = tree.parents_BS == node_B[:, None]
    child_B = torch.where(children_BS.any(-1), children_BS.int().argmax(-1), NOTHING)
    kept_B = tree.tokens_BS.gather(1, child_B.clamp_min(0)[:, None])[:, 0]
    return torch.where(child_B == NOTHING, sampler.choose(logits_BV), kept_B), child_B


def no_residual(logits_BV, tree, node_B, sampler):
    """Wrong: a drawn token is tested, and after a rejection the next one comes from p, not from what p has left."""
    token_B, child_B = RIGHT_FOR_CHAINS(logits_BV, tree, node_B, sampler)
    return torch.where(child_B == NOTHING, sampler.choose(logits_BV), token_B), child_B


RIGHT_FOR_CHAINS = verify._drawn


@pytest.mark.parametrize(
    ("shape", "rule"),
    [(CHAIN, by_node_number), (CHAIN, always), (CHAIN, no_residual), (DEFAULT_SHAPE, by_node_number), (DEFAULT_SHAPE, always)],
)
def test_a_wrong_rule_fails_the_same_test(shape, rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test can tell."""
    monkeypatch.setattr(verify, "_drawn" if shape == CHAIN else "_chosen", rule)
    assert drawn_p_value(shape, {}) < WRONG
