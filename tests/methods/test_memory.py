"""What the formulas say of a draft's memory against what is held while it trains."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from longspec import methods
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.estimate.memory import parameter_bytes
from tests.train.estimate.test_memory import LiveBytes

pytestmark = pytest.mark.slow  # half a minute and more as a whole

WIDE = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
LONG, KEYS = WIDE | {"vocab_size": 4096, "hidden_size": 64}, WIDE | {"num_key_value_heads": 8}
STEPS = {"layers": (0, 1, 2), "steps": 7}
BLOCKS: dict[str, Any] = {"layers": (1, 2), "block_size": 8}
# Method, part by which the estimate may be off, shape of the target, tokens, settings, dtype.
CASES: list[tuple[str, float, dict[str, Any], int, dict[str, Any], torch.dtype]] = [
    ("eagle3", 0.1, WIDE, 1024, {**STEPS, "vocabulary": 256}, torch.float32),
    ("eagle3", 0.1, LONG, 512, {**STEPS, "vocabulary": 1024}, torch.bfloat16),
    ("eagle3", 0.1, KEYS, 1024, {**STEPS, "vocabulary": 256, "fc_norm": True}, torch.bfloat16),
    ("dflash", 0.2, WIDE, 1024, {**BLOCKS, "depth": 3, "block_size": 16}, torch.float32),
    ("dflash", 0.2, LONG, 512, {**BLOCKS, "depth": 1, "vocabulary": 1024}, torch.bfloat16),
    ("dflash", 0.2, KEYS, 512, {**BLOCKS, "depth": 2, "anchors": 128, "loss": "hard"}, torch.float32),
]


def measured(method: Any, config: PretrainedConfig, settings: Any, tokens: int, dtype: torch.dtype) -> int:
    """The peak of the draft's forward and backward, weights, gradients and what is kept of the target aside."""
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    states = TargetStates(target.requires_grad_(False).eval(), attention="sdpa")
    made, ids = method.trainer(states, settings, None), torch.arange(tokens)[None] % config.vocab_size
    with_loss = getattr(settings, "loss", "soft") == "soft"
    names = method.reads(config, settings, with_llm_loss=with_loss)
    found = states(ids, torch.arange(tokens)[None], None, names)
    states.forward = lambda *_: found
    own = made.draft_model
    with LiveBytes([*target.parameters(), *own.parameters(), *own.buffers(), *found.values()]) as live:
        loss = made(ids, ids, with_llm_loss=with_loss).loss
        forward, live.peak = live.peak, live.live
        loss.backward()
    return max(forward, live.peak - parameter_bytes(own))


@pytest.mark.parametrize(("name", "off", "shape", "tokens", "chosen", "dtype"), CASES)
def test_memory_is_within_a_part(
    name: str, off: float, shape: dict[str, Any], tokens: int, chosen: dict[str, Any], dtype: torch.dtype
) -> None:
    config, proposed = Qwen2Config(**shape, num_hidden_layers=3, tie_word_embeddings=False), chosen.get("vocabulary")
    ids = {} if proposed is None else {"ids": tuple(range(proposed)), "target_vocabulary": config.vocab_size}
    rows = {"row_tokens": tokens} if name == "dflash" else {}
    method, settings = methods.method(name), methods.settings_of(name).Settings(**chosen, **ids, **rows)
    estimate = method.memory(config, settings, tokens, dtype, torch.device("cpu"))
    peak = measured(method, config, settings, tokens, dtype)
    assert peak * (1 - off) < estimate.kept + max(estimate.losses, estimate.backward) < peak * (1 + off)
