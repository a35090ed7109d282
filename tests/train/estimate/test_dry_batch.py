"""The dry batch: nothing is left of it, it finds out-of-memory, and the message names what helps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from longspec.train import dry_batch
from tests.train.estimate.test_memory import glide_of, setup_of

SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = Qwen2Config(**SHAPE, num_hidden_layers=2)


def test_nothing_is_left_of_the_dry_batch() -> None:
    torch.manual_seed(3)
    glide, setup = glide_of(CONFIG, torch.float32, lag_mode="blocks"), setup_of(CONFIG, 64, torch.float32, lag_mode="blocks")
    weights = {name: tensor.clone() for name, tensor in glide.state_dict().items()}
    state, sizes = torch.random.get_rng_state(), []
    glide.states.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(inputs[0].shape)))
    dry_batch.dry_batch(glide, replace(setup, micro_batch=3), with_llm_loss=True)
    assert sizes == [(3, 64)]
    assert all(parameter.grad is None for parameter in glide.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in glide.state_dict().items())


def run_out(glide: Any, error: RuntimeError) -> None:
    """Have the losses fail, after the forward has taken its memory."""

    def fail(*_: object) -> None:
        raise error

    glide._losses = fail


def test_out_of_memory_is_explained_and_other_failures_are_not_taken_for_it() -> None:
    glide, setup = glide_of(CONFIG, torch.float32), setup_of(CONFIG, 64, torch.float32)
    run_out(glide, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    with pytest.raises(ValueError, match=r"out of memory: .* runtime\.micro_batch"):
        dry_batch.dry_batch(glide, setup, with_llm_loss=True)
    run_out(glide, RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        dry_batch.dry_batch(glide, setup, with_llm_loss=True)
