"""A target partitioned over two ranks: same losses, no rank holds the whole, checkpoints of the draft alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from longspec.atomic_files import write_json
from longspec.train.checkpoint.save_load import draft_state_dict
from tests.corpus import Corpus
from tests.jobs import Job, torchrun

# Above the size up to which DeepSpeed leaves parameters whole on every rank, but for norms and biases.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}


def save(config: Qwen2Config | Qwen3MoeConfig, folder: Path) -> str:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def job(tmp_path: Path, corpus: Corpus, name: str, target: Path, *overrides: str) -> Job:
    return Job(tmp_path / name, target, corpus.packed, ["recipe.steps=6", "recipe.optimizer.lr=1e-3", *overrides], torchrun(2))


@pytest.mark.slow
def test_jobs_with_a_partitioned_target(tmp_path: Path, corpus: Corpus) -> None:
    """Same training, also with chunks and ZeRO-3 for the draft."""
    path = save(Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE), tmp_path / "target")
    manifest = tmp_path / "target_manifest.json"
    write_json(manifest, {"path": path, "source": "test", "files": {}})
    partitioned, chunks = "runtime.target=partitioned", "runtime.target_chunk=20"
    whole = job(tmp_path, corpus, "replicated", manifest)
    zero3 = job(tmp_path, corpus, "zero3", manifest, partitioned, chunks, "deepspeed=zero3-offload")
    for one in (whole, zero3):
        one.run()
    losses = [torch.tensor([[row["loss"], row["llm_loss"]] for row in one.rows()]) for one in (whole, zero3)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    states = [draft_state_dict(one.out / "checkpoints/last") for one in (whole, zero3)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-4)
    sizes = [sum(file.stat().st_size for file in (one.out / "checkpoints/last").rglob("*.*")) for one in (whole, zero3)]
    assert sizes[1] < 1.1 * sizes[0], "a checkpoint holds the draft alone"
