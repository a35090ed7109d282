"""Chains and trees that are chosen by the draft's acceptance and by what rounds cost, where no shape is given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspec import chain_length
from longspec.chain_length import ChainAcceptance, ChainCosts, TreeAcceptance
from longspec.decode import chain_costs
from longspec.decode import generate as door
from longspec.decode.chain_costs import best_shape, measure_costs
from longspec.decode.generate import generate, load_drafter
from longspec.decode.levels import DEFAULT_SHAPE, Levels
from longspec.decode.lookup import WithLookup
from longspec.decode.prefill import prefill
from tests.decode.models import DEPTHS, METHODS, generated, make_drafter, make_target
from tests.methods.test_attach import save_draft, save_target

NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ALWAYS = ChainAcceptance(0.0, ((9, 10), (9, 9), (9, 9)))
PROMPT = [5, 9, 2, 7]


def given_costs(monkeypatch: pytest.MonkeyPatch, *rounds: float) -> list[int]:
    """Rounds cost this; the longest chain of each measurement."""
    asked: list[int] = []

    def measured(target: Any, drafter: Any, start: Any, longest: int) -> ChainCosts:
        asked.append(longest)
        return ChainCosts(1.0, rounds[:longest])

    monkeypatch.setattr(chain_costs, "measure_costs", measured)
    return asked


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes that generate decodes with."""
    seen: list[Any] = []
    decode = door.speculate

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(named["shape"])
        return decode(*arguments, **named)

    monkeypatch.setattr(door, "speculate", watched)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_measuring_leaves_prompts_drafter_and_random_numbers_as_they_were(method: str) -> None:
    """Two rows of different length: their texts after it are the target's own."""
    target = make_target(4, **DEPTHS[method])
    drafter, prompts = make_drafter(method, target), [PROMPT, PROMPT[:2]]
    start, state = prefill(target, prompts, 3, drafter.reads), torch.get_rng_state()
    before = [layer.keys.clone() for layer in start.cache.layers]
    measure_costs(target, drafter, start, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(start.cache.layers, before, strict=True))
    decoded = door.speculate(target, drafter, start, max_new_tokens=NEW, shape=2)
    assert [row.ids for row in decoded.rows] == [generated(target, prompt, NEW) for prompt in prompts]


def test_generate_takes_the_chain_that_pays_best(monkeypatch: pytest.MonkeyPatch, shapes: list[Any]) -> None:
    """1.9, 2.8 and 3.7 tokens a round: two tokens are best at 1, 1.1 and 2 seconds, one at 1, 2 and 3; greedy text."""
    target = make_target(5)
    drafter = make_drafter("glide", target)
    drafter.acceptance = (ALWAYS,)
    ids, own = torch.tensor([PROMPT]), generated(target, PROMPT, NEW)
    asked = given_costs(monkeypatch, 1.0, 1.1, 2.0)
    for _ in range(2):
        assert generate(target, ids, draft=drafter, **GREEDY)[0, len(PROMPT) :].tolist() == own
    assert (shapes, asked) == ([2, 2], [3])  # measured once
    generate(target, ids.repeat(2, 1), draft=drafter, **GREEDY | {"attention_mask": torch.ones(2, 4)})
    assert asked == [3, 3]  # two rows cost otherwise
    given_costs(monkeypatch, 1.0, 2.0, 3.0)
    other = make_target(5)
    again = make_drafter("glide", other)
    again.acceptance = (ALWAYS,)
    generate(other, ids, draft=again, **GREEDY)
    assert shapes[-1] == 1


def test_a_given_shape_and_a_draft_that_was_not_evaluated_measure_nothing(
    monkeypatch: pytest.MonkeyPatch, shapes: list[Any]
) -> None:
    asked, target = given_costs(monkeypatch, 1.0, 1.0, 1.0), make_target(6)
    drafter = make_drafter("glide", target)
    generate(target, torch.tensor([PROMPT]), draft=drafter, **GREEDY)
    drafter.acceptance = (ALWAYS,)
    generate(target, torch.tensor([PROMPT]), draft=drafter, shape=4, **GREEDY)
    assert (shapes, asked) == ([DEFAULT_SHAPE, 4], [])


@pytest.mark.parametrize(("tree", "seconds", "best"), [((2, 2), 1.9, (2, 2)), ((2, 2), 2.1, 2), ((9, 9), 1.9, (9, 9))])
def test_a_tree_is_taken_where_it_brings_more_tokens_a_second(
    monkeypatch: pytest.MonkeyPatch, tree: Levels, seconds: float, best: Any
) -> None:
    """2.8 tokens of a chain of two in 1.4 seconds against 4 of a tree in less or more than 2; a tree of 18 tokens runs too."""
    target = make_target(5)
    drafter = make_drafter("glide", target)
    start = prefill(target, [PROMPT], reads=drafter.reads)
    drafter.acceptance = (ALWAYS, TreeAcceptance(0.0, tree, 40, 10), TreeAcceptance(1.0, (3, 3), 90, 10))
    assert best_shape(target, drafter, start, 0.0) in (1, 2, 3, tree)  # as measured here, whatever that is
    given_costs(monkeypatch, 1.0, 1.4, 4.0)
    monkeypatch.setattr(chain_costs, "_round_seconds", lambda target, drafter, start, shape: seconds)
    assert best_shape(make_target(5), drafter, start, 0.0) == best


def test_with_prompt_lookup_its_own_acceptance_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 tokens of a chain of two in 1.4 seconds, 4 of a tree in 1.9 or 1.8; where none was measured, that of drafts alone."""
    target = make_target(5)
    drafter = make_drafter("glide", target)
    start = prefill(target, [PROMPT], reads=drafter.reads)
    alone = (ALWAYS, TreeAcceptance(0.0, (2, 2), 10, 10))
    beside = (TreeAcceptance(0.0, (1, 1), 30, 10, copied=8), TreeAcceptance(0.0, (2, 2), 40, 10, copied=8))
    given_costs(monkeypatch, 1.0, 1.4, 4.0)
    for seconds, held, best in ((1.9, beside, 2), (1.8, beside, (2, 2)), (1.8, (), 2)):
        monkeypatch.setattr(chain_costs, "_round_seconds", lambda target, drafter, start, shape, seconds=seconds: seconds)
        drafter.acceptance = (*alone, *held)
        assert best_shape(make_target(5), WithLookup(drafter, 8), start, 0.0) == best
        assert best_shape(make_target(5), drafter, start, 0.0) == 2


def test_a_draft_folder_tells_its_acceptance(tmp_path: Path) -> None:
    """And does without it."""
    draft = tmp_path / "draft"
    save_draft(save_target("qwen2", tmp_path / "target"), draft)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert load_drafter(target, draft).acceptance == ()
    chain_length.write_acceptance(draft, [ALWAYS])
    assert load_drafter(target, draft).acceptance == load_drafter(target, draft / "model.safetensors").acceptance == (ALWAYS,)
