"""A DFlash draft's operations in closed form against torch's own counter, and its memory against what is held."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from longspec.methods.dflash import method as dflash_method
from longspec.methods.dflash.method import METHOD
from longspec.methods.dflash.settings import Settings
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.estimate.memory import parameter_bytes
from tests.eager import EAGER
from tests.methods.test_dflash import CONFIGS, REDUCED, make
from tests.targets import VOCABULARY
from tests.train.estimate.test_memory import LiveBytes

pytestmark = pytest.mark.slow  # half a minute and more as a whole

B, S, W = 2, 20, 4


@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama", {"depth": 2, **REDUCED}), ("qwen3", {"depth": 1, "loss": "hard", "sliding_window": 6})],
)
def test_a_step_is_counted_as_torch_counts_it(name: str, settings: dict[str, Any]) -> None:
    """Dense attention multiplies every pair of slots and keys of a row."""
    made = make(name, dtype=torch.float32, anchors=6, block_size=W, **settings)
    made.states.attention = EAGER
    ids = torch.randint(0, VOCABULARY, (B, S))
    found = made.states(ids, torch.arange(S).expand(B, S), None, ["hidden.1", "hidden.3", "final"])
    made.states.forward = lambda *_: found
    with FlopCounterMode(display=False) as counter:
        output = made(ids, ids, with_llm_loss=False)
        output.loss.backward()
    config, chosen, slots = made.states.config, made.settings, 6 * W
    assert dflash_method.slots_of(replace(chosen, row_tokens=S), B * S) == B * slots
    places = torch.arange(S - 1)  # evenly spread over the anchors there can be
    anchors = places[(places * 6 // (S - 1)) != ((places - 1) * 6 // (S - 1))]
    predicted = B * int(sum((anchors + slot < S).sum() for slot in range(1, W)))
    is_soft = chosen.loss == "soft"
    wanted = dflash_method.projection_operations(config, chosen, B * S)
    wanted += dflash_method.block_operations(config, chosen, B * slots, B * slots * (S + slots))
    wanted += dflash_method.head_operations(config, chosen, predicted, with_teacher=is_soft)
    assert counter.get_total_flops() == wanted


def test_the_whole_is_its_parts() -> None:
    """With every token an anchor, pairs counted one by one in documents that do not see each other."""
    config, window = CONFIGS["llama"], 6
    settings = Settings(layers=(1, 3), depth=2, block_size=W, anchors=40, row_tokens=40, vocabulary=30, sliding_window=window)
    pairs = 0
    for length in (9, 22, 9):
        for place in range(length):
            for slot in range(W):
                pairs += sum(place + slot - key < window for key in range(place)) + slot + 1
    of_layers, of_head = dflash_method.operations(config, settings, 40, [9, 22, 9], 40, with_llm_loss=True)
    projection = dflash_method.projection_operations(config, settings, 40)
    assert of_layers == pytest.approx(projection + dflash_method.block_operations(config, settings, 40 * W, pairs))
    assert of_head == dflash_method.head_operations(config, settings, 40 * (W - 1), with_teacher=True)


WIDE = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
SHAPES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "plain": (WIDE, 1024, {"depth": 3, "block_size": 16}),
    "long vocabulary": (WIDE | {"vocab_size": 4096, "hidden_size": 64}, 512, {"depth": 1, "vocabulary": 1024, "block_size": 8}),
    "many blocks": (WIDE | {"num_key_value_heads": 8}, 512, {"depth": 2, "anchors": 128, "block_size": 8, "loss": "hard"}),
}


def measured(config: PretrainedConfig, settings: Settings, tokens: int, dtype: torch.dtype) -> int:
    """The peak of the draft's forward and backward, weights, gradients and what is kept of the target aside."""
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    states = TargetStates(target.requires_grad_(False).eval(), attention="sdpa")
    made, ids = METHOD.trainer(states, settings, None), torch.arange(tokens)[None] % config.vocab_size
    with_loss = settings.loss == "soft"
    names = [tensor.name for tensor in METHOD.reads(config, settings, with_llm_loss=with_loss)]
    found = states(ids, torch.arange(tokens)[None], None, names)
    states.forward = lambda *_: found
    own = made.draft_model
    with LiveBytes([*target.parameters(), *own.parameters(), *own.buffers(), *found.values()]) as live:
        loss = made(ids, ids, with_llm_loss=with_loss).loss
        forward, live.peak = live.peak, live.live
        loss.backward()
    return max(forward, live.peak - parameter_bytes(own))


def settings_of(config: PretrainedConfig, tokens: int, chosen: dict[str, Any]) -> Settings:
    proposed = chosen.get("vocabulary")
    ids = {} if proposed is None else {"ids": tuple(range(proposed)), "target_vocabulary": config.vocab_size}
    return Settings(layers=(1, 2), row_tokens=tokens, **chosen, **ids)


@pytest.mark.parametrize(("name", "dtype"), list(zip(SHAPES, [torch.float32, torch.bfloat16, torch.float32], strict=True)))
def test_memory_is_within_a_fifth(name: str, dtype: torch.dtype) -> None:
    shape, tokens, chosen = SHAPES[name]
    config = Qwen2Config(**shape, num_hidden_layers=3, tie_word_embeddings=False)
    settings = settings_of(config, tokens, chosen)
    estimate = dflash_method.memory(config, settings, tokens, dtype, torch.device("cpu"))
    peak = measured(config, settings, tokens, dtype)
    assert peak * 0.8 < estimate.kept + max(estimate.losses, estimate.backward) < peak * 1.2
