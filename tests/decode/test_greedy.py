"""Speculative decoding against transformers' own generate, and the draft in decoding against the draft in training."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from longspec.config import Draft
from longspec.decode.drafters import GlideDrafter, LookupDrafter
from longspec.decode.greedy import accepted_prefix, decode_plain, decode_speculative, near_tie_margin, prefill
from longspec.evaluate.compare import compare
from longspec.train.models.glide import GlideLayer
from longspec.train.models.qwen2_glide import Qwen2Glide
from longspec.train.models.visibility import Visibility

WINDOW, CHAIN, NO_EOS = 12, 4, -1
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
}


def make_target(seed: int, family: type = Qwen2Config):
    torch.manual_seed(seed)
    config = family(**SHAPE, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None)
    return AutoModelForCausalLM.from_config(config).double().eval()


def make_layer(target, scale: float = 0.2) -> GlideLayer:
    layer = GlideLayer(target.config).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return layer


def generated(target, prompt: list[int], count: int) -> list[int]:
    ids_BS = torch.tensor([prompt])
    whole = {"attention_mask": torch.ones_like(ids_BS), "pad_token_id": 0, "eos_token_id": None}
    out = target.generate(ids_BS, do_sample=False, max_new_tokens=count, **whole)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", [Qwen2Config, LlamaConfig])
@pytest.mark.parametrize("drafter", ["glide", "lookup"])
def test_tokens_are_those_of_generate(family: type, drafter: str) -> None:
    """float64, random models, prompts on both sides of the window."""
    compared = 0
    for seed in range(4):
        target = make_target(seed, family)
        for length in (1, 5, 40):
            prompt = torch.randint(0, 61, (length,)).tolist()
            proposes = GlideDrafter(target, make_layer(target), WINDOW) if drafter == "glide" else LookupDrafter()
            start = prefill(target, prompt)
            fast = decode_speculative(target, proposes, start, 60, NO_EOS, CHAIN)
            expected = generated(target, prompt, len(fast.ids))
            assert fast.ids == expected
            assert decode_plain(target, start, 60, NO_EOS).ids == expected[:61]
            assert fast.new_tokens == len(fast.ids) - 1
            compared += len(expected)
    assert compared > 12 * 60


def test_draft_logits_in_decoding_are_those_of_training(tmp_path: Path) -> None:
    """Step d of a chain equals the training forward at the same token with lag d, through windows and rejections."""
    make_target(0).save_pretrained(tmp_path)
    settings = Draft(window=WINDOW, anchors="off", lag_mode="random")
    glide = Qwen2Glide.from_pretrained(str(tmp_path), dtype=torch.float64, draft=settings)
    target, glide.draft_model = glide.target, (layer := make_layer(glide.target, 0.3))
    hidden = []
    drafter = GlideDrafter(target, layer, WINDOW)
    step = drafter._step
    drafter._step = lambda *arguments, **names: hidden.append(step(*arguments, **names)) or hidden[-1]
    ids = torch.randint(0, 61, (30,)).tolist()
    for length in (30, 33, 34):  # the second proposal rejects one drafted token, the third follows a whole round
        ids = ids + [(t + 1) % 61 for t in range(length - len(ids))]
        sequence = torch.tensor([ids])
        positions = torch.arange(len(ids))[None]
        keys, values, _ = glide.target_states(sequence[:, :-1], positions[:, :-1], None)
        hidden.clear()
        with torch.no_grad():
            chain = drafter.propose(ids, keys, values, CHAIN)
        for lag in range(1, CHAIN + 1):
            whole = torch.tensor([ids + chain[: lag - 1]])
            positions = torch.arange(whole.shape[1])[None]
            with torch.no_grad():
                keys, values, _ = glide.target_states(whole, positions, None)
                embedded = target.model.embed_tokens(whole)
                rope = glide.rope(positions, embedded)
                own = layer.own_keys_values(embedded, rope)
                lags = Visibility(lag_B=torch.tensor([lag]))
                trained = layer(embedded, rope, own, (keys, values), Visibility(window=WINDOW), lags)
            torch.testing.assert_close(hidden[lag - 1][0, -1], trained[0, -1])
        assert drafter.own[0].shape[2] <= WINDOW + 1 + CHAIN


class Oracle:
    """Knows the target's own continuation."""

    def __init__(self, text: list[int], wrong: bool) -> None:
        self.text, self.wrong = text, wrong

    def propose(self, ids, keys, values, count):
        ahead = self.text[len(ids) : len(ids) + count]
        return [(token + 1) % 61 for token in ahead] if self.wrong else ahead


def test_a_perfect_draft_is_accepted_whole_and_a_wrong_one_never() -> None:
    target = make_target(1)
    prompt = [3, 1, 4]
    text = prompt + generated(target, prompt, 60)
    start = prefill(target, prompt)
    perfect = decode_speculative(target, Oracle(text, wrong=False), start, 30, NO_EOS, CHAIN)
    assert perfect.accepted == [CHAIN] * 6
    assert perfect.new_tokens == 30
    wrong = decode_speculative(target, Oracle(text, wrong=True), start, 30, NO_EOS, CHAIN)
    assert wrong.accepted == [0] * 30
    assert perfect.ids == wrong.ids[:31] == text[3:34]


def test_decoding_ends_at_eos_in_and_after_a_chain() -> None:
    target = make_target(1)
    prompt = [3, 1, 4]
    text = prompt + generated(target, prompt, 60)
    start = prefill(target, prompt)
    for place in range(1, 20):
        eos = text[3 + place]
        first = text[3:].index(eos)
        for wrong in (False, True):
            fast = decode_speculative(target, Oracle(text, wrong), start, 40, eos, CHAIN)
            assert fast.ids == text[3 : 4 + first] == decode_plain(target, start, 40, eos).ids


def test_accepted_prefix() -> None:
    assert accepted_prefix([5, 6, 7], [5, 6, 9, 1], eos=0) == 2
    assert accepted_prefix([5, 0, 7], [5, 0, 7, 1], eos=0) == 1
    assert accepted_prefix([], [5], eos=0) == 0


def test_a_difference_is_a_fault_unless_it_is_a_near_tie() -> None:
    target = make_target(2)
    start = prefill(target, [1, 2, 3])
    plain, fast = (decode_plain(target, start, 10, NO_EOS) for _ in range(2))
    assert (compare(plain, fast).tokens_compared, compare(plain, fast).mismatches) == (11, 0)
    fast.ids[4] = int(plain.logits[4].topk(2).indices[1])
    verdict = compare(plain, fast)
    assert (verdict.tokens_compared, verdict.mismatches, verdict.near_ties) == (5, 1, 0)
    plain.logits[4] = plain.logits[4].clone()
    plain.logits[4][fast.ids[4]] = plain.logits[4].max() - 1e-14
    assert compare(plain, fast).near_ties == 1
    del fast.ids[4:]
    assert (compare(plain, fast).mismatches, compare(plain, fast).near_ties) == (1, 0)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 1e-12), (torch.float32, 2e-4), (torch.bfloat16, 0.7)])
def test_a_near_tie_is_small_beside_real_margins(dtype: torch.dtype, largest: float) -> None:
    """For logits up to 20, of which the best two are often several apart."""
    assert 0 < near_tie_margin(torch.tensor([-3.0, 20.0], dtype=dtype)) <= largest
