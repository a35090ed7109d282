"""What decoding holds: the draft its window, the target the text and nothing beside it; and the host asks once a round."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, Qwen2Config

from longspec.decode import cache
from longspec.decode.autoregressive import decode_plain
from longspec.decode.cache import LONGEST_AHEAD, compact, tokens_ahead
from longspec.decode.levels import DEFAULT_SHAPE
from longspec.decode.lookup import LookupDrafter
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.families import layer_windows
from longspec.methods.glide.drafter import GlideDrafter
from tests.decode.models import DEPTHS, METHODS, WINDOW, generated, make_drafter, make_eagle3, make_layer, make_target
from tests.refusals import refused
from tests.targets import EAGLE3_TARGETS, TARGETS

pytestmark = pytest.mark.slow  # half a minute and more as a whole

NO_EOS = -1


class Watched(GlideDrafter):
    """Keeps what it held, and holds the target's cache against a forward over the text, whenever it proposes."""

    def begin(self, prompts, hidden):
        super().begin(prompts, hidden)
        self.held, self.lengths = [], []

    def propose(self, draft_input, levels, sampler):
        self.held.append(sum(x.numel() for x in self.own.of_text()))
        self.lengths.append(draft_input.lengths)
        assert draft_input.cached["keys.1"].shape[2] == max(draft_input.lengths)
        for row, (text, length) in enumerate(zip(draft_input.texts, draft_input.lengths, strict=True)):
            assert length == len(text) - 1
            last = prefill(self.target, [text[:-1]]).cache.layers[-1]
            for cached, wanted in zip(map(draft_input.cached.get, self.reads), (last.keys, last.values), strict=True):
                torch.testing.assert_close(cached[row, :, :length], wanted[0])
        return super().propose(draft_input, levels, sampler)


def test_caches_hold_the_window_and_the_text() -> None:
    """Rows of different length, in every round of some hundred tokens."""
    target = make_target(1)
    drafter = Watched(target, make_layer(target), WINDOW)
    prompts = [[5] * length for length in (1, 30, 9)]
    decoded = speculate(target, drafter, prompts, max_new_tokens=120, shape=(3, 5, 4))
    assert sum(sum(row.accepted) for row in decoded.rows) > 0
    per_token = 2 * 2 * 8  # keys and values, two heads of eight
    most = WINDOW * per_token
    assert all(held <= most * len(lengths) for held, lengths in zip(drafter.held, drafter.lengths, strict=True))
    assert drafter.held[20] == most * len(drafter.lengths[20])
    assert max(map(max, drafter.lengths)) > 8 * WINDOW


class Looks(TorchFunctionMode):
    """Counts what makes the host wait for a number of the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        waits = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "equal"}
        self.count += getattr(func, "__name__", "") in waits
        return func(*args, **kwargs or {})


HALF = tuple(range(0, 61, 2))  # of the tokens, as a draft vocabulary
DRAFTERS = [
    ("glide", WINDOW, None, DEFAULT_SHAPE, 0.0),
    ("glide", WINDOW, HALF, 4, 0.7),
    ("eagle3", WINDOW, HALF, DEFAULT_SHAPE, 0.0),
    ("eagle3", None, None, 4, 0.7),
    ("dflash", WINDOW, HALF, 4, 0.7),
    ("dflash", None, None, DEFAULT_SHAPE, 0.0),
]


@pytest.mark.parametrize(("method", "window", "ids", "shape", "temperature"), DRAFTERS)
def test_the_host_looks_once_a_round(method: str, window, ids, shape, temperature: float) -> None:
    """All of decoding, transformers' forward included; once more for the tokens after the prompts."""
    target = make_target(0, **DEPTHS[method])
    drafter = make_drafter(method, target, window, ids)
    start = prefill(target, [[1, 2, 3], [4, 5, 6], [7]], reads=drafter.reads)
    settings = {"max_new_tokens": 20, "shape": shape, "temperature": temperature, "top_k": 9, "top_p": 0.9}
    with Looks() as looks:
        decoded = speculate(target, drafter, start, **settings)
    assert looks.count == 1 + max(row.rounds for row in decoded.rows)


@torch.inference_mode()
def test_a_cache_without_room_grows_in_place_and_its_start_with_it() -> None:
    """Room is made once for many tokens; what is kept of a tree overwrites nothing before it."""
    target = make_target(0)
    start = prefill(target, [list(range(60))])
    before = [layer.keys.clone() for layer in start.cache.layers]
    lengths_B, places = torch.tensor([60]), set()
    with start.lent(0) as lent:
        cache = lent.cache
        for _ in range(4):
            new = torch.randn(2, 1, 2, 3, 8, dtype=torch.float64)
            keys = [cache.update(*new, layer_idx=layer)[0] for layer in range(2)]
            places.add(keys[0].data_ptr())
            compact(cache, 3, torch.tensor([[0, 2]]), lengths_B, cache.get_seq_length() - 1)
            torch.testing.assert_close(cache.layers[0].keys[:, :, -2:], new[0][:, :, [0, 2]])
            lengths_B = lengths_B + 2
        assert len(places) == 1
    assert start.cache.layers[0].keys.data_ptr() in places
    torch.testing.assert_close([layer.keys for layer in start.cache.layers], before, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_different_length_are_left_bit_for_bit(method: str) -> None:
    """Every logit of a second decoding is that of one on prompts of its own; rows leave in between."""
    target, logits = make_target(3, **DEPTHS[method]), []
    prompts = [torch.randint(0, 61, (length,)).tolist() for length in (1, 30, 9)]
    drafter, settings = make_drafter(method, target), {"max_new_tokens": 40, "shape": (3, 5, 4)}
    settings["eos"] = generated(target, prompts[1], 12)[-1]
    start = prefill(target, prompts, reads=drafter.reads)
    before = [x.clone() for layer in start.cache.layers for x in (layer.keys, layer.values)]
    target.lm_head.register_forward_hook(lambda _module, _inputs, out: logits[-1].append(out))
    for beginning in (prompts, start, start):
        logits.append([])
        decoded = speculate(target, drafter, beginning, **settings)
        assert all(map(torch.equal, before, (x for layer in start.cache.layers for x in (layer.keys, layer.values))))
    assert len({len(row.ids) for row in decoded.rows}) > 1
    del logits[0][:3]  # the prompts' own
    assert len(logits[0]) > 12
    torch.testing.assert_close(logits[1:], [logits[0]] * 2, rtol=0, atol=0)


def test_a_decoding_that_fails_gives_its_start_back() -> None:
    """In the target's second layer when the first one holds a tree more."""
    target, left = make_target(1), [4]
    drafter = GlideDrafter(target, make_layer(target), WINDOW)
    start = prefill(target, [[5] * 20, [6] * 3], reads=drafter.reads)
    before = [layer.keys.clone() for layer in start.cache.layers]
    expected = [row.ids for row in speculate(target, drafter, start, max_new_tokens=30).rows]

    def fail(*_) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise InterruptedError

    hook = target.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        speculate(target, drafter, start, max_new_tokens=30)
    hook.remove()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(start.cache.layers, before, strict=True))
    assert [row.ids for row in speculate(target, drafter, start, max_new_tokens=30).rows] == expected


@pytest.mark.parametrize("name", ["gpt_oss", "mistral", "phi3", "qwen3-tied-sliding-first"])
def test_plain_decoding_reads_no_more_than_a_layers_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own cache, with the same text. Else each draft would look good beside it."""
    torch.manual_seed(7)
    target = AutoModelForCausalLM.from_config((TARGETS | EAGLE3_TARGETS)[name]).eval()
    prompt, seen, update = [5, 9, 2, 7] * 5, list[int](), cache.RoomyLayer.update

    def watched(*given: Any, **named: Any) -> Any:
        shown = update(*given, **named)
        seen.append(shown[0].shape[2])
        return shown

    monkeypatch.setattr(cache.RoomyLayer, "update", watched)
    start = prefill(target, [prompt])
    expected = generated(target, prompt, 30)
    assert decode_plain(target, start, 30, NO_EOS).ids == expected
    windows = layer_windows(target.config)
    assert seen[-len(windows) :] == [window or 49 for window in windows]
    assert speculate(target, LookupDrafter(), start, max_new_tokens=30).rows[0].ids == expected


def test_a_start_serves_one_decoding_at_a_time() -> None:
    """Another one within it is refused, and one on a cache of its own is not."""
    target = make_target(1)
    drafter = make_drafter("glide", target)
    start = prefill(target, [[5] * 20], reads=drafter.reads)
    expected, inner = decode_plain(target, start, 20, NO_EOS).ids, []

    def within(*_) -> None:
        for decode in (
            lambda: decode_plain(target, start, 20, NO_EOS),
            lambda: speculate(target, LookupDrafter(), start, max_new_tokens=9),
        ):
            with refused("prompts", "prefill", kind=RuntimeError):
                decode()
        inner.append(decode_plain(target, prefill(target, start.prompts), 20, NO_EOS).ids)

    assert speculate(target, drafter, start, max_new_tokens=20, on_tokens=within).rows[0].ids == expected
    assert len(inner) > 1
    assert all(ids == expected for ids in inner)


@pytest.mark.parametrize(("family", "dtype"), [(Qwen2Config, torch.bfloat16), (MistralConfig, torch.float32)])
def test_prompts_are_read_as_with_transformers_own_cache(family: type, dtype: torch.dtype) -> None:
    """To the bit, windows included."""
    target = make_target(2, family, **{"sliding_window": 9} if family is MistralConfig else {}).to(dtype)
    prompt, own = torch.randint(0, 61, (40,)).tolist(), DynamicCache()
    with torch.inference_mode():
        logits_V = target(torch.tensor([prompt]), past_key_values=own, use_cache=True, logits_to_keep=1).logits[0, -1]
    for start, row in ((prefill(target, [prompt], 7), 0), (prefill(target, [[1, 2], prompt]), 1)):
        assert torch.equal(start.logits_BV[row], logits_V)
        for layer, wanted in zip(start.cache.layers, own.layers, strict=True):
            assert torch.equal(layer.keys[row], wanted.keys[0])
            assert torch.equal(layer.values[row], wanted.values[0])


def test_a_text_without_end_takes_its_first_part_of_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on when that is used up."""
    target, prompts = make_target(3, **DEPTHS["eagle3"]), [[7] * 20, [8] * 5]
    assert tokens_ahead(10**9, 69) == LONGEST_AHEAD + 70
    monkeypatch.setattr(cache, "LONGEST_AHEAD", 4)
    expected = [generated(target, prompt, 60) for prompt in prompts]
    for drafter in (make_drafter("glide", target), make_eagle3(target)):
        decoded = speculate(target, drafter, prompts, max_new_tokens=60, shape=3)
        assert [row.ids for row in decoded.rows] == expected
