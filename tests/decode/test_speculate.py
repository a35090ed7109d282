"""Speculative decoding against transformers' own generate: greedy text, ends of text, streaming, rows of different length."""

from functools import cache, partial

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from longspec.decode.autoregressive import decode_plain, near_tie_margin
from longspec.decode.levels import DEFAULT_SHAPE, Budget, Shape, depth_of
from longspec.decode.lookup import LookupDrafter
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.decode.texts import Stops
from longspec.measure.lines import judge
from longspec.measure.measurer import gap_of
from tests.decode import models
from tests.decode.models import DEPTHS, METHODS, Itself, Oracle, generated, make_dflash, make_drafter, make_eagle3, make_target
from tests.refusals import refused

pytestmark = pytest.mark.slow  # half a minute and more as a whole

CHAIN, NO_EOS, NEW = 4, -1, 36
BUDGET = Budget(16, step=0.0, node=0.0)  # the random drafts are sure of nothing


HALF = tuple(range(0, 61, 2))  # of the tokens, as a draft vocabulary
GREEDY = [  # drafter, family, shape, options of the draft, which change no text, and of the target
    ("glide", Qwen2Config, CHAIN, {}, {}),
    ("glide", LlamaConfig, DEFAULT_SHAPE, {}, {}),
    ("glide", LlamaConfig, BUDGET, {}, {}),
    ("lookup", MistralConfig, (3,), {}, {"sliding_window": 9}),
    ("eagle3", LlamaConfig, DEFAULT_SHAPE, {}, {"max_position_embeddings": 76}),  # full at the end of the longest text
    ("eagle3", Qwen2Config, CHAIN, {"window": 3}, {}),
    ("eagle3", Qwen2Config, Budget(9), {"window": models.WINDOW, "ids": HALF}, {}),
    ("eagle3", LlamaConfig, BUDGET, {}, {}),
    ("eagle3", Qwen3Config, (3, 5, 4), {"fc_norm": True, "norm_output": True, "window": models.WINDOW}, {}),
    ("eagle3", MistralConfig, CHAIN, {"ids": HALF}, {"sliding_window": 9}),
    ("dflash", Qwen3Config, CHAIN, {}, {"max_position_embeddings": 76}),
    ("dflash", LlamaConfig, DEFAULT_SHAPE, {"window": models.WINDOW, "tied_k_norm": False}, {}),
    ("dflash", Qwen2Config, BUDGET, {"ids": HALF}, {}),
    ("dflash", LlamaConfig, Budget(9), {"window": models.WINDOW}, {}),
    ("dflash", MistralConfig, 9, {"ids": HALF}, {"sliding_window": 9}),  # longer than a block
]


@pytest.mark.parametrize(("drafter", "family", "shape", "options", "shape_of_target"), GREEDY)
def test_tokens_are_those_of_generate(drafter: str, family: type, shape, options: dict, shape_of_target: dict) -> None:
    """float64, random models, prompts on both sides of the windows, alone and in one batch."""
    made = {"lookup": lambda _: LookupDrafter(), "eagle3": make_eagle3, "dflash": make_dflash}
    make = made.get(drafter) or partial(make_drafter, drafter)
    check_greedy(family, DEPTHS.get(drafter, {}) | shape_of_target, shape, lambda target: make(target, **options))


@cache
def greedy_texts(family: type, **shape_of_target) -> tuple:
    """A target, prompts, transformers' own texts of them, and where torch's random numbers go on."""
    target = make_target(0, family, **shape_of_target)
    prompts = [torch.randint(0, 61, (length,)).tolist() for length in (1, 5, 40, 5)]
    return target, prompts, [generated(target, prompt, NEW) for prompt in prompts], torch.get_rng_state()


def check_greedy(family: type, shape_of_target: dict, shape, make) -> None:
    target, prompts, expected, state = greedy_texts(family, **shape_of_target)
    torch.set_rng_state(state)
    proposes = make(target)
    decoded = speculate(target, proposes, prompts, max_new_tokens=NEW, shape=shape)
    assert [row.ids for row in decoded.rows] == expected
    assert sum(sum(row.accepted) for row in decoded.rows) > 0
    start = prefill(target, prompts[1:2], reads=proposes.reads)
    assert speculate(target, proposes, start, max_new_tokens=NEW, shape=shape).rows[0].ids == expected[1]
    assert decode_plain(target, start, NEW, NO_EOS).ids == expected[1]


@pytest.mark.parametrize("shape", [CHAIN, DEFAULT_SHAPE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_kept_whole(shape: Shape, temperature: float) -> None:
    """Chains always. Trees when greedy; when sampling they cannot hold every token the target may draw. A tree by a budget may
    leave out the likeliest path: each of its tokens is the likeliest behind those before it, their product need not be.
    """
    target = make_target(1, **models.SMALL, num_key_value_heads=1)
    generator = torch.Generator().manual_seed(0)
    settings = {"shape": shape, "temperature": temperature, "generator": generator}
    decoded = speculate(target, Itself(target), [[3, 1, 4]], max_new_tokens=31, **settings)
    depth = depth_of(shape)
    if shape == CHAIN or temperature == 0:
        assert decoded.rows[0].accepted == [depth] * (30 // (depth + 1))
        assert decoded.rows[0].position_acceptance(depth) == [(decoded.rows[0].rounds,) * 2] * depth
    assert len(decoded.rows[0].ids) == 31


def test_decoding_ends_at_eos_in_and_after_a_chain() -> None:
    target = make_target(1)
    prompt = [3, 1, 4]
    text = prompt + generated(target, prompt, NEW)
    start = prefill(target, [prompt])
    for place in range(1, 12):
        eos = text[3 + place]
        first = text[3:].index(eos)
        for wrong in (False, True):
            (row,) = speculate(target, Oracle([text], wrong), start, max_new_tokens=40, eos=eos, shape=CHAIN).rows
            assert row.ids == text[3 : 4 + first] == decode_plain(target, start, 40, eos).ids
            assert (row.new_tokens, row.finish) == (first, "stop")


def test_rows_end_each_at_its_own_time_and_leave_the_batch() -> None:
    """Their tokens are streamed as they are returned: the prompt's next one, and what each round brings."""
    target = make_target(3, **DEPTHS["eagle3"])
    prompts = [torch.randint(0, 61, (length,)).tolist() for length in (7, 2, 19, 4, 4, 33)]
    alone = [generated(target, prompt, NEW) for prompt in prompts]
    eos = [alone[0][3], alone[2][11], alone[5][30]]
    expected = [text[: min((text.index(token) + 1 for token in eos if token in text), default=NEW)] for text in alone]
    assert len({len(text) for text in expected}) > 3
    batches, streamed = [], {}
    draft = Oracle([prompt + text for prompt, text in zip(prompts, alone, strict=True)])
    propose = draft.propose
    draft.propose = lambda draft_input, *rest: batches.append(len(draft_input.texts)) or propose(draft_input, *rest)

    def on_tokens(row: int, tokens: list[int]) -> None:
        streamed.setdefault(row, []).append(tokens)

    for proposes in (*(make_drafter(method, target) for method in METHODS), make_eagle3(target), make_dflash(target), draft):
        streamed.clear()
        decoded = speculate(target, proposes, prompts, max_new_tokens=NEW, eos=eos, shape=3, on_tokens=on_tokens)
        assert [row.ids for row in decoded.rows] == expected
        assert [[token for tokens in streamed[row] for token in tokens] for row in range(len(prompts))] == expected
        assert [len(streamed[row]) for row in range(len(prompts))] == [1 + row.rounds for row in decoded.rows]
    assert batches == sorted(batches, reverse=True)
    assert len(set(batches)) > 2


class Letters:
    """A tokenizer of which each token is one to three letters."""

    words = ("a", "b", "ab", "bc", "cab", "d")

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(self.words[token % 6] for token in ids)


def test_stops_look_at_eos_and_text() -> None:
    stops = Stops(eos=[7, 8], strings=["abc"], tokenizer=Letters())
    assert stops.end([], [0, 8, 7]) == 1
    assert stops.end([0], [0, 3, 1]) == 1  # a|a bc
    assert stops.end([5] * 50 + [0], [1, 3, 0]) is None  # d...da|b bc a
    assert Stops().end([], [1, 2, 3]) is None


def test_what_is_out_of_range_is_refused_with_the_fix() -> None:
    target = make_target(0, **models.SMALL, num_key_value_heads=1)
    faults = [
        ({"prompts": [[1], []]}, ("prompts", "bos")),
        ({"max_new_tokens": 0}, ("max_new_tokens", "is 0")),
        ({"shape": (4, 41)}, ("shape (4, 41)", "level 2", "41 nodes", "1 to 40")),
        ({"shape": 0}, ("shape 0", "such as 4")),
        ({"shape": Budget(0)}, (f"shape {Budget(0)}", "1 or more")),
        ({"shape": {"depth": 3}}, ("shape {'depth': 3}", "{'nodes': 16}")),
        ({"temperature": -1.0}, ("`temperature`", "-1.0")),
        ({"temperature": 1.0, "top_p": 1.5}, ("`top_p`", "1.5")),
        ({"stop_strings": ["x"]}, ("stop_strings", "tokenizer=")),
        ({"stop_strings": "x", "tokenizer": object()}, ("stop_strings: 'x'", "list")),
    ]
    for wrong, told in faults:
        with refused(*told):
            speculate(target, LookupDrafter(), **{"prompts": [[1]], "max_new_tokens": 1} | wrong)


@pytest.mark.parametrize(("dtype", "method"), [(torch.float32, "glide"), (torch.bfloat16, "eagle3"), (torch.float32, "dflash")])
def test_in_lower_precision_every_difference_is_a_near_tie(dtype: torch.dtype, method: str) -> None:
    """Of the target's own logits: closer than so many roundings of the dtype, at the size of the largest logit.

    How a machine rounds is its own matter, so each forward's logits are here moved by a quarter of that bound at most.
    """
    mismatches = accepted = 0
    for seed in range(2):
        target = make_target(seed, hidden_size=64, initializer_range=0.1, **DEPTHS[method]).to(dtype)
        target.lm_head.register_forward_hook(_rounded_another_way)
        drafter = make_drafter(method, target)
        drafter.layer.to(dtype)
        start = prefill(target, [[3] * 5], reads=drafter.reads)
        plain = decode_plain(target, start, 50, NO_EOS)
        (row,) = speculate(target, drafter, start, max_new_tokens=50).rows
        acceptance = judge(plain.ids, row.ids, gap_of(plain))
        assert acceptance.near_ties == acceptance.mismatches
        mismatches, accepted = mismatches + acceptance.mismatches, accepted + sum(row.accepted)
    assert accepted > 0
    assert (mismatches > 0) == (dtype == torch.bfloat16)  # float32's noise is too small to turn a choice here


def _rounded_another_way(module: torch.nn.Module, inputs: tuple, logits_BQV: torch.Tensor) -> torch.Tensor:
    return logits_BQV + near_tie_margin(logits_BQV) / 4 * (2 * torch.rand_like(logits_BQV) - 1)
