"""A draft with prompt lookup beside it: transformers' own text, and trees that hold both and nothing twice."""

import random

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from longspec.chain_length import ChainAcceptance, TreeAcceptance
from longspec.decode import lookup
from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.generate import generate
from longspec.decode.levels import MOST_COPIED, Levels
from longspec.decode.lookup import Followers, WithLookup
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import NOTHING, DraftTree, TreeBuilder
from tests.decode.models import DEPTHS, make_drafter, make_target
from tests.decode.test_speculate import check_greedy
from tests.refusals import refused

pytestmark = pytest.mark.slow  # half a minute and more as a whole

COPIED = 6


@pytest.mark.parametrize(
    ("method", "family", "shape"), [("glide", Qwen2Config, 2), ("eagle3", LlamaConfig, (2, 4)), ("dflash", LlamaConfig, 4)]
)
def test_tokens_are_those_of_generate(family: type, shape, method: str) -> None:
    """float64; rows that copy differently much, alone and in one batch."""
    check_greedy(family, DEPTHS[method], shape, lambda target: WithLookup(make_drafter(method, target), COPIED))


@pytest.mark.parametrize("method", DEPTHS)
def test_what_is_copied_is_kept_beyond_the_drafts_depth_and_the_draft_goes_on_behind_it(method: str) -> None:
    """On a text that runs in a circle, since the next token hangs on the last one alone."""
    target = make_target(2, **DEPTHS[method])
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    drafter, prompt = make_drafter(method, target), torch.randint(0, 61, (20,)).tolist()
    alone = speculate(target, drafter, [prompt], max_new_tokens=80, shape=(2, 2)).rows[0]
    both = speculate(target, WithLookup(drafter, COPIED), [prompt], max_new_tokens=80, shape=(2, 2)).rows[0]
    assert both.ids == alone.ids
    assert max(both.accepted) == COPIED
    assert both.rounds < alone.rounds


class Fixed(Drafter):
    """Proposes trees that are given."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        return self.tree


def walks(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The texts that the rule for chosen nodes can go down: of two children with one token the first."""
    tokens, parents = tree.tokens_BS[row].tolist(), tree.parents_BS[row].tolist()
    texts, found = {0: ()}, []
    for node in range(1, len(tokens)):
        if tokens[node] == NOTHING or parents[node] not in texts:
            continue
        text = (*texts[parents[node]], tokens[node])
        assert len(text) == int(tree.depths_S[node])
        if text not in found:
            texts[node] = text
            found.append(text)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_holds_both_and_nothing_twice_that_is_reached(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trees of few tokens, and copies that agree with them for a while, by row: against sets of texts."""
    draw, rows = random.Random(seed), 1 + seed % 3
    levels = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    builder = TreeBuilder(torch.zeros(rows, dtype=torch.int64))
    for size in levels:
        above = builder.sizes[-1]
        pairs = [draw.sample([(parent, token) for parent in range(above) for token in range(4)], size) for _ in range(rows)]
        parents_BC, tokens_BC = torch.tensor(pairs).unbind(-1)
        builder.add(parents_BC, tokens_BC)
    plain = builder.tree()
    copied = [[draw.randrange(4) for _ in range(draw.randint(0, 5))] for _ in range(rows)]
    for row in range(1, rows):  # one of the tree's own texts, and more
        copied[row] = [*draw.choice(walks(plain, row)), *copied[row]]
    said = iter(copied)
    monkeypatch.setattr(Followers, "of", lambda *_: next(said))
    drafter = WithLookup(Fixed(plain), 9)
    texts = [[0]] * rows
    drafter.begin(texts, {})
    zeros = torch.zeros(rows, dtype=torch.int64)
    tree = drafter.propose(DraftInput(texts, (0,) * rows, zeros, zeros, {}), tuple(levels), Sampler())
    for row in range(rows):
        wanted = set(walks(plain, row)) | {tuple(copied[row][:count]) for count in range(1, len(copied[row]) + 1)}
        assert set(walks(tree, row)) == wanted
        parents = tree.parents_BS[row].tolist()
        for node, seen in enumerate(tree.seen_BSS[row].tolist()):
            path, at = set(), node
            while at != NOTHING:
                path.add(at)
                at = parents[at]
            assert {other for other, is_seen in enumerate(seen) if is_seen} == path
    if rows == 1:  # nothing is computed twice
        assert len(walks(tree, 0)) == tree.tokens_BS.shape[1] - 1
    assert tree.depth == int(tree.depths_S.max())


def test_a_single_token_is_not_looked_up_and_drawn_chains_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(0)
    drafter = WithLookup(make_drafter("glide", target), COPIED)
    grown = []
    monkeypatch.setattr(DraftTree, "with_branch", lambda tree, *_: grown.append(tree) or tree)
    speculate(target, drafter, [[1, 2, 3, 4]], max_new_tokens=1, shape=2)
    monkeypatch.setattr(lookup, "SHORTEST", 1)
    speculate(target, drafter, [[5] * 20], max_new_tokens=9, shape=2, temperature=1.0)
    assert not grown


@pytest.mark.parametrize("alone", [False, True])
def test_without_a_shape_rounds_that_bring_much_are_measured_too(alone: bool) -> None:
    """On a text that runs in a circle, of which each round copies as much as is allowed, beside the draft or alone."""
    target = make_target(2)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    drafter, ids_BT = make_drafter("glide", target), torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 90, "do_sample": False, "pad_token_id": 0}
    lookup_alone = TreeAcceptance(0.0, (), 640, 10, copied=MOST_COPIED)
    drafter.acceptance = (ChainAcceptance(0.0, ((1, 2), (1, 1))), *([lookup_alone] if alone else []))
    ids_BT = target.generate(ids_BT, **settings)
    found = generate(target, ids_BT, draft=drafter, prompt_lookup_num_tokens=None if alone else MOST_COPIED, **settings)
    assert torch.equal(found, target.generate(ids_BT, **settings))


def test_generate_takes_the_number_by_transformers_name() -> None:
    target = make_target(1)
    target.config.name_or_path = ""
    drafter, ids_BT = make_drafter("glide", target), torch.tensor([[5, 6, 7] * 5])
    wanted = target.generate(ids_BT, max_new_tokens=20, do_sample=False, pad_token_id=0)
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "shape": (2, 2)}
    assert torch.equal(generate(target, ids_BT, draft=drafter, prompt_lookup_num_tokens=4, **settings), wanted)
    with refused("prompt_lookup_num_tokens: 0", "1 to 64", "such as 8"):
        generate(target, ids_BT, draft=drafter, prompt_lookup_num_tokens=0, **settings)
    target.generation_config.prompt_lookup_num_tokens = 4
    with refused("prompt_lookup_num_tokens", "generation config", "argument"):
        generate(target, ids_BT, draft=drafter, **settings)
