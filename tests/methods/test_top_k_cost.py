"""Memory and operations of both methods where likeliest tokens take the place of the target's final hidden states."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

from longspec.methods.eagle3.method import METHOD as EAGLE3
from longspec.methods.eagle3.settings import Settings
from longspec.methods.glide.method import METHOD as GLIDE
from longspec.methods.glide.settings import Draft
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import BEST_TOKEN, FINAL, NEXT_LOG_PROB, TOP_LOG_PROBS, TOP_TOKENS
from longspec.train.estimate.memory import parameter_bytes
from tests.train.estimate.test_memory import LiveBytes

TOKENS, K = 512, 32
WIDE = {"vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
CONFIG = Qwen2Config(**WIDE, num_hidden_layers=3, tie_word_embeddings=False)
GLIDES = {"anchors": "off", "lag_mode": "fixed", "lag": 2}
EAGLES = {"layers": (0, 1, 2), "vocabulary": 512, "ids": tuple(range(512)), "target_vocabulary": 1024}
CASES: dict[str, tuple[Any, Any]] = {
    "glide soft": (GLIDE, Draft(**GLIDES)),
    "eagle3": (EAGLE3, Settings(**EAGLES, steps=7)),
    "eagle3 all tokens": (EAGLE3, Settings(layers=(0, 1, 2), steps=2)),
}


def made(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor], Tensor]:
    """A trainer whose states are there already, these, and a row of text."""
    method, settings = CASES[name]
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=STATES_ATTENTION, dtype=dtype)
    states = TargetStates(target.requires_grad_(False).eval(), attention="sdpa")
    ids, positions = torch.arange(TOKENS)[None] * 7 % CONFIG.vocab_size, torch.arange(TOKENS)[None]
    names = [tensor.name for tensor in method.reads(CONFIG, settings, with_llm_loss=True) if tensor.name != FINAL]
    found = states(ids, positions, None, names)
    found[TOP_TOKENS] = torch.arange(K, dtype=torch.int32).expand(1, TOKENS, K).contiguous()
    found[TOP_LOG_PROBS] = torch.full((1, TOKENS, K), -4.0, dtype=torch.float16)
    found[BEST_TOKEN], found[NEXT_LOG_PROB] = torch.zeros(1, TOKENS, dtype=torch.int32), torch.zeros(1, TOKENS)
    states.forward = lambda *_: found
    return method.trainer(states, settings, None), found, ids


@pytest.mark.parametrize(("name", "dtype"), [("eagle3", torch.bfloat16), ("eagle3 all tokens", torch.float32)])
def test_memory_is_within_a_tenth(name: str, dtype: torch.dtype) -> None:
    trainer, found, ids = made(name, dtype)
    own = trainer.draft_model
    with LiveBytes([*trainer.states.parameters(), *own.parameters(), *own.buffers(), *found.values()]) as live:
        loss = trainer(ids, ids).loss
        forward, live.peak = live.peak, live.live
        loss.backward()
    measured = max(forward, live.peak - parameter_bytes(own))
    method, settings = CASES[name]
    estimate = method.memory(CONFIG, settings, TOKENS, dtype, torch.device("cpu"), top_k=K)
    assert measured * 0.9 < estimate.kept + max(estimate.losses, estimate.backward) < measured * 1.1


@pytest.mark.parametrize("name", ["glide soft", "eagle3"])
def test_the_heads_products_are_counted_as_torch_counts_them(name: str) -> None:
    """Those of the draft alone: it is linear in what the head multiplies, so all others cancel out between two labellings."""
    trainer, _, ids = made(name, torch.float32)
    labels = ids.clone()
    labels[:, TOKENS // 2 :] = -100
    counted = []
    for each in (ids, labels):
        with FlopCounterMode(display=False) as counter:
            trainer(ids, each).loss.backward()
        counted.append(counter.get_total_flops())
    method, settings = CASES[name]
    one, other = (
        method.operations(CONFIG, settings, TOKENS, [TOKENS], count, with_llm_loss=True, top_k=K)[1]
        for count in (TOKENS - 1, TOKENS // 2 - 1)
    )
    # EAGLE-3's counts are as if every label ended a chain in every step: the same excess in both.
    assert counted[0] - counted[1] == one - other
