"""A target partitioned over two ranks: same losses, no rank holds the whole, checkpoints of the draft alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from longspec.atomic_files import write_json
from longspec.train.checkpoint.save_load import draft_state_dict
from tests.corpus import Corpus
from tests.jobs import Job, finish, kill_all, start, torchrun

# Above the size up to which DeepSpeed leaves parameters whole on every rank, but for norms and biases.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PERSISTENT = 100_000


def save(config: Qwen2Config | Qwen3MoeConfig, folder: Path) -> str:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def run_program(root: Path, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What partitioned_program.py measured on both ranks."""
    command = [*torchrun(2), str(root / "tests/states/partitioned_program.py"), str(folder), *arguments]
    text, code = finish(start(command, folder))
    assert code == 0, text
    return [result for rank in range(2) for result in json.loads((folder / f"{rank}.json").read_text())]


@pytest.mark.slow
def test_partitioned_is_replicated_for_every_kind_of_parameter(tmp_path: Path, root: Path) -> None:
    """Untied, tied and expert weights; whole rows, chunks and the early end; hard and soft labels."""
    paths = [
        save(Qwen2Config(vocab_size=275, **WIDE, tie_word_embeddings=False), tmp_path / "untied"),
        save(Qwen2Config(vocab_size=275, **WIDE, tie_word_embeddings=True), tmp_path / "tied"),
        save(Qwen3MoeConfig(vocab_size=275, **WIDE, **EXPERTS, head_dim=64), tmp_path / "experts"),
    ]
    results = run_program(root, tmp_path, *paths)
    assert len(results) == 2 * len(paths)
    for result in results:
        assert result["largest_difference"] <= 1e-5
        assert result["left_over"] == []
        for name, (share, whole, held) in result["shares"].items():
            assert share == -(-whole // 2), name
            assert held < whole or whole <= PERSISTENT, name
        assert sum(whole > PERSISTENT for _, whole, _ in result["shares"].values()) >= 8


def job(tmp_path: Path, corpus: Corpus, name: str, target: Path, *overrides: str) -> Job:
    return Job(tmp_path / name, target, corpus.packed, ["recipe.steps=6", "recipe.optimizer.lr=1e-3", *overrides], torchrun(2))


@pytest.mark.slow
def test_jobs_with_a_partitioned_target(tmp_path: Path, corpus: Corpus) -> None:
    """Same training, also with chunks and ZeRO-3 for the draft; a job begun with one kind of target goes on with the other."""
    path = save(Qwen2Config(vocab_size=corpus.build.vocabulary, **WIDE), tmp_path / "target")
    manifest = tmp_path / "target_manifest.json"
    write_json(manifest, {"path": path, "source": "test", "files": {}})
    partitioned, chunks = "runtime.target=partitioned", "runtime.target_chunk=20"
    whole = job(tmp_path, corpus, "replicated", manifest)
    zero3 = job(tmp_path, corpus, "zero3", manifest, partitioned, chunks, "deepspeed=zero3-offload")
    changed = job(tmp_path, corpus, "changed", manifest, partitioned, "runtime.save_every=2")
    for one in (whole, zero3):
        one.run()
    process = changed.start()
    changed.wait_for(3, process)
    kill_all(process)
    finish(process)
    changed.overrides.remove(partitioned)
    assert "starting at step 2" in (log := changed.run()) or "starting at step 4" in log
    losses = [torch.tensor([[row["loss"], row["llm_loss"]] for row in one.rows()]) for one in (whole, zero3, changed)]
    assert torch.equal(losses[2], losses[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    states = [draft_state_dict(one.out / "checkpoints/last") for one in (whole, zero3, changed)]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    for name, tensor in states[0].items():
        assert torch.equal(states[2][name], tensor)
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-4)
    sizes = [sum(file.stat().st_size for file in (one.out / "checkpoints/last").rglob("*.*")) for one in (whole, zero3)]
    assert sizes[1] < 1.1 * sizes[0], "a checkpoint holds the draft alone"
