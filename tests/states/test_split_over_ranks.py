"""A target split over ranks that train on rows of their own: losses and gradients of a whole one, and whom it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import GptOssConfig, LlamaConfig, Olmo2Config, PretrainedConfig, Qwen2Config

from longspec.atomic_files import write_json
from longspec.config import Runtime
from longspec.states.load import check_ranks
from longspec.train.checkpoint.save_load import draft_state_dict
from tests.corpus import Corpus, sentences
from tests.jobs import Job, finish, start, torchrun
from tests.states.test_partitioned import save
from tests.train.test_held_out_estimate import make_packed

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
TARGETS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
}
DRAFTS = ("glide soft", "glide hard", "eagle3", "dflash")


@pytest.mark.slow
def test_every_rank_trains_on_its_own_rows_as_beside_a_whole_target(root: Path, tmp_path: Path) -> None:
    """All methods, labels of each kind, lags and positions with anchors, rows packed on every second rank, chunks, early ends.

    In float64, but for the losses and their gradients, which are taken in float32.
    """
    ranks, paths = 2, [save(config, tmp_path / name) for name, config in TARGETS.items()]
    text, code = finish(start([*torchrun(ranks), str(root / "tests/states/split_program.py"), str(tmp_path), *paths], tmp_path))
    assert code == 0, text
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for results in told:
        for result in results:
            assert list(result["differences"]) == [f"{name} {chunk}" for name in DRAFTS for chunk in (None, 8)]
            assert max(result["differences"].values()) <= 1e-7
            assert result["held"]["tensor_parallel"] < 1.1 * result["held"]["replicated"] / ranks
    losses = [result["losses"]["glide soft None"] for results in told for result in results]
    assert len(set(losses)) == ranks * len(paths), "the ranks have rows of their own"


@pytest.mark.slow
def test_a_job_and_its_estimates_are_those_of_a_whole_target(tmp_path: Path, corpus: Corpus) -> None:
    """In chunks, under ZeRO-3."""
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30)]
    packed = make_packed(tmp_path / "packed", corpus, "base", sentences(200), held_out)
    target = tmp_path / "target.json"
    shape = SHAPE | {"vocab_size": corpus.build.vocabulary, "initializer_range": 0.05}
    write_json(target, {"path": save(Qwen2Config(**shape), tmp_path / "target"), "source": "test", "files": {}})
    asked = ["recipe.steps=4", "recipe.optimizer.lr=1e-3", "runtime.held_out_every=2", "runtime.held_out_rows=3"]
    split = ["runtime.target=tensor_parallel", "runtime.target_chunk=20", "deepspeed=zero3-offload"]
    jobs = [
        Job(tmp_path / name, target, packed, [*asked, *more], torchrun(2)) for name, more in (("whole", []), ("split", split))
    ]
    for job in jobs:
        job.run()
    for left, right in zip(*(job.rows() for job in jobs), strict=True):
        for name in ("loss", "llm_loss", "agreement"):
            assert left[name] == pytest.approx(right[name], rel=1e-5)
        assert ("held_out" in left) == ("held_out" in right) == (left["step"] % 2 == 0)
        for name, value in left.get("held_out", {}).items():
            assert name == "seconds" or value == pytest.approx(right["held_out"][name], rel=1e-4), name
    states = [draft_state_dict(job.out / "checkpoints/last") for job in jobs]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-4)


def test_ranks_that_cannot_share_its_heads_are_refused_by_the_key() -> None:
    runtime = OmegaConf.structured(Runtime(target="tensor_parallel"))
    wanted = (
        r"^runtime\.target: tensor_parallel: target/config\.json: num_key_value_heads: 4 heads cannot be split over 3 ranks; "
        r"start 1, 2, 4 of them, or set it to partitioned$"
    )
    with pytest.raises(ValueError, match=wanted):
        check_ranks(TARGETS["llama"], runtime, 3)
    with pytest.raises(ValueError, match=r"'gpt_oss': .* start one rank, or set it to partitioned"):
        check_ranks(GptOssConfig(), runtime, 2)
    check_ranks(GptOssConfig(), runtime, 1)
    check_ranks(Olmo2Config(**SHAPE), runtime, 3)  # its plan gathers the heads
    for other in ("replicated", "partitioned"):
        check_ranks(TARGETS["llama"], OmegaConf.structured(Runtime(target=other)), 3)
