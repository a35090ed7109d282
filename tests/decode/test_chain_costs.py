"""Chains and trees that are chosen by the draft's acceptance and by what rounds cost, where no shape is given."""

from itertools import takewhile
from typing import Any

import pytest
import torch

from longspec.chain_length import ChainAcceptance, TreeAcceptance
from longspec.decode import chain_costs
from longspec.decode import generate as door
from longspec.decode.chain_costs import best_shape, best_way
from longspec.decode.drafters import DraftInput
from longspec.decode.fallback import Copying, NoDraft, Watched, WhilePays
from longspec.decode.generate import generate
from longspec.decode.levels import DEFAULT_SHAPE, Budget, Levels
from longspec.decode.lookup import Followers, LookupDrafter, WithLookup
from longspec.decode.prefill import prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.decode.tree import DraftTree
from tests.decode.models import DEPTHS, METHODS, Oracle, generated, make_drafter, make_target

NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ALWAYS = ChainAcceptance(0.0, ((9, 10), (9, 9), (9, 9)))
PROMPT = [5, 9, 2, 7]


def given_costs(
    monkeypatch: pytest.MonkeyPatch, *chains: float, tree: float = 9.0, lookup: float = 9.0, shapes: Any = None
) -> list[Any]:
    """Rounds cost this, without a draft a second; which were measured."""
    asked: list[Any] = []

    def seconds(target: Any, drafter: Any, start: Any, shape: Any, sampling: dict[str, Any]) -> float:
        asked.append(shape)
        if isinstance(drafter, NoDraft | LookupDrafter):
            return 1.0 if isinstance(drafter, NoDraft) else lookup
        return chains[shape - 1] if isinstance(shape, int) else (shapes or {}).get(shape, tree)

    monkeypatch.setattr(chain_costs, "_round_seconds", seconds)
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
    drafter.acceptance = (ALWAYS, TreeAcceptance(0.0, (9, 9), 40, 10))
    assert best_way(target, drafter, start)[1] in (1, 2, 3, (9, 9))  # as measured here, whatever that is
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(start.cache.layers, before, strict=True))
    decoded = door.speculate(target, drafter, start, max_new_tokens=NEW, shape=2)
    assert [row.ids for row in decoded.rows] == [generated(target, prompt, NEW) for prompt in prompts]


def test_generate_takes_the_chain_that_pays_best(monkeypatch: pytest.MonkeyPatch, shapes: list[Any]) -> None:
    """1.9, 2.8 and 3.7 tokens a round: two tokens are best at 1, 1.1 and 2 seconds; greedy text."""
    target = make_target(5)
    drafter = make_drafter("glide", target)
    drafter.acceptance = (ALWAYS,)
    ids, own = torch.tensor([PROMPT]), generated(target, PROMPT, NEW)
    asked = given_costs(monkeypatch, 1.0, 1.1, 2.0)
    for _ in range(2):
        assert generate(target, ids, draft=drafter, **GREEDY)[0, len(PROMPT) :].tolist() == own
    assert shapes == [2, 2]
    assert len(asked) == 2 * 4  # once, of each way twice
    generate(target, ids.repeat(2, 1), draft=drafter, **GREEDY | {"attention_mask": torch.ones(2, 4)})
    assert len(asked) == 2 * 2 * 4  # two rows cost otherwise


def test_rows_that_have_ended_leave_no_cache_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where costs were measured on the prompts' own cache as well, which would hold all rows to the end."""
    target, prompts, made = make_target(5), [PROMPT, PROMPT[::-1]], list[Any]()
    drafter = make_drafter("glide", target)
    drafter.acceptance = (ALWAYS,)
    texts = [generated(target, prompt, NEW) for prompt in prompts]
    end = next(token for token in texts[0] if token not in texts[1])
    given_costs(monkeypatch, 1.0, 1.1, 2.0)
    monkeypatch.setattr(door, "prefill", lambda *given: made.append(prefill(*given)) or made[-1])
    settings = GREEDY | {"eos_token_id": end, "attention_mask": torch.ones(2, 4)}
    found = generate(target, torch.tensor(prompts), draft=drafter, **settings)
    assert found[1, 4:].tolist() == texts[1]
    assert [layer.keys.shape[0] for layer in made[0].cache.layers] == [1] * len(made[0].cache.layers)


def test_a_given_shape_and_a_draft_that_was_not_evaluated_measure_nothing(
    monkeypatch: pytest.MonkeyPatch, shapes: list[Any]
) -> None:
    asked, target = given_costs(monkeypatch, 1.0, 1.0, 1.0), make_target(6)
    drafter = make_drafter("glide", target)
    generate(target, torch.tensor([PROMPT]), draft=drafter, **GREEDY)
    drafter.acceptance = (ALWAYS,)
    generate(target, torch.tensor([PROMPT]), draft=drafter, shape=4, **GREEDY)
    assert (shapes, asked) == ([DEFAULT_SHAPE, 4], [])


def tree(levels: Levels, tokens: int, copied: int = 0) -> TreeAcceptance:
    """So many tokens in ten rounds."""
    return TreeAcceptance(0.0, levels, tokens, 10, copied)


DRAFT = (True, None)  # whether the draft begins, and whether lookup should be sooner than plain decoding; None: not evaluated
ALONE = TreeAcceptance(0.0, (), 105, 100, copied=8)  # prompt lookup's 1.05 tokens a round
BESIDE = (tree((2, 2), 10), tree((1, 1), 30, 8), tree((2, 2), 40, 8))  # 3 tokens of a chain with lookup, 4 of a tree


@pytest.mark.parametrize(
    ("held", "copied", "chains", "costs", "kind", "shape"),
    [
        ((tree((2, 2), 40),), 0, (1.0, 1.4, 4.0), {"tree": 1.9}, DRAFT, (2, 2)),
        ((tree((2, 2), 40),), 0, (1.0, 1.4, 4.0), {"tree": 2.1}, DRAFT, 2),
        ((tree((9, 9), 40),), 0, (1.0, 1.4, 4.0), {"tree": 1.9}, DRAFT, (9, 9)),
        (BESIDE, 8, (1.0, 1.4, 4.0), {"tree": 1.9}, DRAFT, 2),
        (BESIDE, 8, (1.0, 1.4, 4.0), {"tree": 1.8}, DRAFT, (2, 2)),
        (BESIDE[:1], 8, (1.0, 1.4, 4.0), {"tree": 1.8}, DRAFT, 2),  # none was measured: that of drafts alone
        (BESIDE, 0, (1.0, 1.4, 4.0), {"tree": 1.8}, DRAFT, 2),
        ((), 0, (2.0, 2.9, 4.0), {}, (False, None), 1),
        ((ALONE,), 0, (2.0, 2.9, 4.0), {"lookup": 1.1}, (False, False), 8),
        ((ALONE,), 0, (2.0, 2.9, 4.0), {"lookup": 0.9}, (False, True), 8),
        ((ALONE,), 0, (1.0, 2.9, 4.0), {"lookup": 0.9}, (True, True), 1),
        ((ALONE,), 0, (9.0, 9.0, 9.0), {"lookup": 0.6}, (False, True), 8),
    ],
)
def test_what_brings_most_tokens_a_second_is_taken(
    monkeypatch: pytest.MonkeyPatch, held: Any, copied: int, chains: Any, costs: dict[str, float], kind: Any, shape: Any
) -> None:
    """Of chains with 1.9, 2.8 and 3.7 tokens, a tree, lookup and plain decoding in a second; the text is the target's own."""
    target = make_target(5)
    drafter = make_drafter("glide", target)
    drafter.acceptance = (ALWAYS, *held, TreeAcceptance(1.0, (3, 3), 90, 10))
    given_costs(monkeypatch, *chains, **costs)
    start = prefill(target, [PROMPT], reads=drafter.reads)
    own = WithLookup(drafter, copied) if copied else drafter
    way, chosen = best_way(target, own, start)
    found = way.drafter is own, way.copying and way.copying.pays
    assert (found, chosen) == (kind, shape)
    assert not kind[0] or best_shape(target, own, start) == shape
    more = {"prompt_lookup_num_tokens": copied} if copied else {}
    found = generate(target, torch.tensor([PROMPT]), draft=drafter, **GREEDY, **more)
    assert found[0, len(PROMPT) :].tolist() == generated(target, PROMPT, NEW)


def counted(oracle: Oracle) -> tuple[Oracle, list[DraftTree]]:
    """The oracle, and the trees that it proposes from now on."""
    propose, proposed = oracle.propose, list[DraftTree]()

    def kept(*given: Any) -> DraftTree:
        proposed.append(propose(*given))
        return proposed[-1]

    oracle.propose = kept
    return oracle, proposed


@pytest.mark.parametrize("wrong", [True, False])
def test_a_draft_that_brings_too_little_on_these_texts_is_left(wrong: bool) -> None:
    """Evaluated at 3 tokens a round, needed 2: after as many rounds of 1 as the evaluation counts for. One that pays stays."""
    target, prompts = make_target(5), [PROMPT, PROMPT[:2]]
    texts = [prompt + generated(target, prompt, 180) for prompt in prompts]
    oracle, proposed = counted(Oracle(texts, wrong))
    drafter = WhilePays(oracle, 3.0, 2.0, None)
    rows = speculate(target, drafter, prompts, max_new_tokens=180, shape=2).rows
    assert [row.ids for row in rows] == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert (len(proposed), rows[0].rounds) == ((9, 179) if wrong else (60, 60))


@pytest.mark.parametrize("text", [[1, 2, 3, 4] * 6, list(range(24)), [1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 8, 1, 2, 3, 9]])
def test_what_lookup_would_bring_is_what_it_brings(text: list[int]) -> None:
    """Told in pieces as a draft's rounds bring them, and held against the drafter itself, round by round."""
    watched = Watched(text[:5])
    for known in (7, 8, 13, len(text)):
        watched.watch(text[:known], 7)
    followers, place, wanted = Followers(), 5, list[int]()
    while place < len(text):
        copied = followers.of(text[:place], 7)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(copied, text[place:], strict=False)))
        if place + kept >= len(text):  # its own token is not known yet
            break
        wanted.append(kept + 1)
        place += kept + 1
    assert [*watched.recent] == wanted
    assert (watched.tokens, watched.rounds) == (sum(wanted), len(wanted))


@pytest.mark.parametrize("needed", [None, 9.0, 0.3])
def test_a_draft_is_left_for_lookup_where_the_text_repeats_itself(needed: float | None) -> None:
    """A right draft of three tokens a round, and prompt lookup whose rounds cost as much, nine times as much, or little."""
    target = make_target(5)
    text = PROMPT + generated(target, PROMPT, 180)
    oracle, proposed = counted(Oracle([text], wrong=False))
    drafter = WhilePays(oracle, 3.0, 1.0, None if needed is None else Copying(8, needed, pays=False))
    (row,) = speculate(target, drafter, [PROMPT], max_new_tokens=180, shape=2).rows
    assert row.ids == text[len(PROMPT) :]
    assert (len(proposed) < 60) == (needed == 0.3)


REPEATED, NEW_WORDS = [1, 2, 3, 4] * 50, list(range(200))
MIXED = [token for number in range(5, 85) for token in (1, number)]  # what stood behind each 1 does not come again


@pytest.mark.parametrize(
    ("text", "pays", "copied", "plain"),
    [
        (REPEATED, True, 23, 0),
        (REPEATED, False, 16, 55),  # eight rounds of nine tokens are awaited
        (NEW_WORDS, False, 0, 195),
        (NEW_WORDS, True, 0, 195),
        (REPEATED[:100] + MIXED, True, 27, 143),  # lookup, until its tokens have become too few
    ],
)
def test_without_a_draft_that_pays_the_texts_say_whether_to_copy(text: list[int], pays: bool, copied: int, plain: int) -> None:
    """A round that copies costs 1.5 plain ones. What was evaluated counts until eight rounds of lookup are known."""
    way, place, found = WhilePays(NoDraft(), 0.0, 1.0, Copying(8, 1.5, pays)), 5, list[bool]()
    way.begin([text[:4]], {})
    while place < len(text):
        roots_B, lengths_B = torch.tensor([text[place - 1]]), torch.tensor([place - 1])
        tree = way.propose(DraftInput([text[:place]], (place - 1,), lengths_B, roots_B, {}), 8, Sampler(0.0))
        tokens = tree.tokens_BS[0, 1:].tolist()
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, text[place:], strict=False)))
        place += kept + 1
        found.append(len(tokens) > 0)
    assert (sum(found), len(found) - sum(found)) == (copied, plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_that_are_drawn_count_without_what_lookup_brought(temperature: float) -> None:
    drafter = WithLookup(make_drafter("glide", make_target(5)), 8)
    drafter.acceptance = (ALWAYS, *BESIDE)
    ways = {each.shape: each.tokens for each in chain_costs._ways(drafter, temperature)}
    assert ways[2] == (3.0 if temperature == 0 else pytest.approx(2.8))
    assert ways[2, 2] == 4.0


def test_sampled_rounds_are_timed_as_they_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(5)
    drafter = make_drafter("glide", target)
    drafter.acceptance = (ALWAYS,)
    asked, decode = list[Any](), chain_costs.speculate

    def watched(*given: Any, **named: Any) -> Any:
        asked.append({name: named.get(name) for name in ("temperature", "top_p")})
        return decode(*given, **named)

    monkeypatch.setattr(chain_costs, "speculate", watched)
    ids, state = torch.tensor([PROMPT]), torch.get_rng_state()
    best_way(target, drafter, prefill(target, [PROMPT], 40, drafter.reads), temperature=0.7, top_k=0, top_p=0.5)
    assert asked == [{"temperature": 0.7, "top_p": 0.5}] * len(asked) != []
    assert torch.equal(torch.get_rng_state(), state)
    generate(target, ids, draft=drafter, **GREEDY)
    assert asked[-1]["temperature"] == 0.0


def test_a_budget_has_the_prices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level costs 0.04 rounds and a node 0.01, at 2 tokens a round of the best chain; the tree is taken if it pays."""
    target = make_target(5)
    drafter = make_drafter("glide", target)
    drafter.acceptance = (ChainAcceptance(0.0, ((1, 1),)), TreeAcceptance(0.0, Budget(11), 30, 10))
    given_costs(monkeypatch, 1.0, 1.05, tree=1.4, shapes={(11,): 1.1})
    _, budget = best_way(target, drafter, prefill(target, [PROMPT], reads=drafter.reads))
    assert (budget.step, budget.node) == pytest.approx((2 * 0.04 * 2, 0.01 * 2))
