"""Estimates of a stage that reads stored states: no target's layers in memory, and none of its operations."""

from typing import Any

import torch
from transformers import LlamaConfig

from longspec.config import compose
from longspec.train.estimate.memory import estimate, peak, setup_of

# The shape of an 8B target.
CONFIG = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
LENGTH, VH = 4096, 128_256 * 4096
GLIDE = ["run=demo", "stage=long", "variant=sinkpi-slicing", f"recipe.data.sequence_length={LENGTH}"]
EAGLE3 = ["run=demo-eagle3", "stage=long", "recipe.method.layers=null", f"recipe.data.sequence_length={LENGTH}"]


def items(*overrides: str, device: str = "cuda") -> tuple[Any, dict[str, int]]:
    config = compose("train", list(overrides))
    setup = setup_of(CONFIG, config.recipe, config.runtime, 2, 1, torch.bfloat16, torch.device(device))
    found: dict[str, int] = {}
    for item in estimate(setup):
        found[f"{item.name}, {'host' if item.on_host else item.phase}"] = item.bytes
    return setup, found


def test_embedding_and_head_alone_are_held_and_two_micro_batches_are_read() -> None:
    for base, token in ((GLIDE, 4096 + 2 * 4096), (EAGLE3, 8 * 4096)):
        online, _ = items(*base)
        setup, found = items(*base, "recipe.states.source=offline")
        assert setup.target_bytes == 2 * (2 * VH + 4096)
        assert found["target's embedding and head, always"] == setup.target_bytes
        assert found["stored states, read ahead, host"] == 2 * token * 2 * LENGTH
        assert found["stored states, in use, target's forward"] == token * 2 * LENGTH
        assert not any("target weights" in name or "target activations" in name for name in found)
        assert peak(estimate(setup)) < peak(estimate(online)) - 12 * 2**30
        _, on_cpu = items(*base, "recipe.states.source=offline", device="cpu")
        assert on_cpu["stored states, read ahead, always"] == 2 * token * 2 * LENGTH
