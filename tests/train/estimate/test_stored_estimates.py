"""Estimates of a stage that reads stored states: no target's layers in memory, and none of its operations."""

from dataclasses import replace

import torch
from transformers import LlamaConfig

from longspec.config import compose
from longspec.train.estimate.memory import Setup, estimate, peak, setup_of

# The shape of an 8B target.
CONFIG = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
LENGTH, VH = 4096, 128_256 * 4096
GLIDE = ["run=demo", "stage=long", "variant=sinkpi-slicing", f"recipe.data.sequence_length={LENGTH}"]
EAGLE3 = ["run=demo-eagle3", "stage=long", "recipe.method.layers=null", f"recipe.data.sequence_length={LENGTH}"]


def setup_for(*overrides: str) -> Setup:
    config = compose("train", list(overrides))
    return setup_of(CONFIG, config.recipe, config.runtime, 2, 1, torch.bfloat16, torch.device("cuda"))


def items(setup: Setup) -> dict[str, int]:
    return {f"{item.name}, {'host' if item.on_host else item.phase}": item.bytes for item in estimate(setup)}


def test_embedding_and_head_alone_are_held_and_two_micro_batches_are_read() -> None:
    for base, token in ((GLIDE, 4096 + 2 * 4096), (EAGLE3, 8 * 4096)):
        setup = setup_for(*base, "recipe.states.source=offline")
        found, on_cpu = items(setup), items(replace(setup, device=torch.device("cpu")))
        assert setup.target_bytes == 2 * (2 * VH + 4096)
        assert found["target's embedding and head, always"] == setup.target_bytes
        assert found["stored states, read ahead, host"] == 2 * token * 2 * LENGTH
        assert found["stored states, in use, target's forward"] == token * 2 * LENGTH
        assert not any("target weights" in name or "target activations" in name for name in found)
        assert peak(estimate(setup)) < peak(estimate(setup_for(*base))) - 12 * 2**30
        assert on_cpu["stored states, read ahead, always"] == 2 * token * 2 * LENGTH
