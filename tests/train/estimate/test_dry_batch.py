"""The dry batch: nothing is left of it, it finds out-of-memory, and the message names what helps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, Qwen2Config

from longspec.config import Runtime
from longspec.train import dry_batch
from longspec.train.estimate import memory
from longspec.train.estimate.memory import BUCKET, OPTIMIZER, Setup
from tests.train.estimate.test_memory import glide_of, recipe_of, setup_of

SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = Qwen2Config(**SHAPE, num_hidden_layers=2)
# Of Llama-3.1-8B, published.
EIGHT_BILLION = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def large() -> Setup:
    """A rank of eight, rows of 32,768 tokens, two at a time."""
    recipe = recipe_of()
    recipe.data.sequence_length = 32768
    runtime = OmegaConf.structured(Runtime())
    return memory.setup_of(EIGHT_BILLION, recipe, runtime, 2, 8, torch.bfloat16, torch.device("cuda"))


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


def test_a_job_that_asks_slurm_for_less_memory_than_its_ranks_need_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, gb = large(), 1024  # MB
    needed = 8 * memory.peak(memory.estimate(setup), on_host=True)
    assert needed > 8 * 16e9  # eight ranks that load a target of 8 billion weights in bfloat16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for asked, is_told in ((None, False), (needed // 2**30 * gb, True), ((needed // 2**30 + 1) * gb, False)):
        if asked:
            monkeypatch.setenv("SLURM_MEM_PER_NODE", str(asked))
        assert ("raise node_mem" in dry_batch.host_shortage(setup)) is is_told


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


def test_on_a_gpu_the_dry_batch_also_takes_what_the_engine_will_hold() -> None:
    for setup, names in ((large(), (OPTIMIZER, BUCKET)), (replace(large(), offload="cpu"), (BUCKET,))):
        expected = sum(item.bytes for item in memory.estimate(setup) if item.name in names)
        assert dry_batch.engine_bytes(setup) == expected > 0
