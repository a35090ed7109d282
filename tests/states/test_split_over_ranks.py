"""A target split over ranks that train on rows of their own: losses and gradients of a whole one, and whom it is refused."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import GptOssConfig, LlamaConfig, Olmo2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from longspec.config import Runtime
from longspec.states.load import check_ranks
from tests.decode.test_tensor_parallel import HEADS, SMALL
from tests.jobs import finish, start, torchrun
from tests.refusals import refused
from tests.states.stored import save_target

SHAPE = SMALL | HEADS
# Above the size up to which DeepSpeed leaves parameters whole on every rank, but for norms and biases.
WIDE = SHAPE | {"vocab_size": 275, "hidden_size": 512, "intermediate_size": 512, "initializer_range": 0.05}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LLAMA = LlamaConfig(**SHAPE)
TARGETS: dict[str, list[PretrainedConfig]] = {
    "tensor_parallel": [Qwen2Config(**SHAPE | TIED), LLAMA],
    "partitioned": [Qwen2Config(**WIDE | TIED), Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=64)],
}
DRAFTS = ("glide soft", "glide hard", "eagle3", "dflash")


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "apart"), [("tensor_parallel", 1e-7), ("partitioned", 1e-5)])
def test_every_rank_trains_on_its_own_rows_as_beside_a_whole_target(
    root: Path, tmp_path: Path, shared: str, apart: float
) -> None:
    """All methods, labels of each kind, lags and positions with anchors, rows packed on every second rank, chunks, early ends.

    Split by heads in float64, but for the losses and their gradients, which are taken in float32; partitioned in float32.
    """
    manifests = [save_target(tmp_path / str(number), config) for number, config in enumerate(TARGETS[shared])]
    ranks, paths = 2, [str(manifest.parent / "target") for manifest in manifests]
    program = [*torchrun(ranks), str(root / "tests/states/split_program.py"), str(tmp_path), shared, *paths]
    text, code = finish(start(program, tmp_path))
    assert code == 0, text
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for results in told:
        for result in results:
            assert list(result["differences"]) == [f"{name} {chunk}" for name in DRAFTS for chunk in (None, 8)]
            assert max(result["differences"].values()) <= apart
            assert result["held"][shared] < 1.1 * result["held"]["replicated"] / ranks
    losses = [result["losses"]["glide soft None"] for results in told for result in results]
    assert len(set(losses)) == ranks * len(paths), "the ranks have rows of their own"


def test_ranks_that_cannot_share_its_heads_are_refused_by_the_key() -> None:
    runtime = OmegaConf.structured(Runtime(target="tensor_parallel"))
    place = "runtime.target: tensor_parallel: target/config.json"
    with refused(f"{place}: num_key_value_heads: 4", "3 ranks", "start 1, 2, 4", "partitioned"):
        check_ranks(LLAMA, runtime, 3)
    with refused(f"{place}: model_type 'gpt_oss'", "one rank", "partitioned"):
        check_ranks(GptOssConfig(), runtime, 2)
    check_ranks(GptOssConfig(), runtime, 1)
    check_ranks(Olmo2Config(**SHAPE), runtime, 3)  # its plan gathers the heads
    for other in ("replicated", "partitioned"):
        check_ranks(LLAMA, OmegaConf.structured(Runtime(target=other)), 3)
