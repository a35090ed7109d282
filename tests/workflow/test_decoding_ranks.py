"""On how many ranks evaluations and answers decode: by an estimate, by hand; what cannot be is refused with the numbers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longspec.families import FAMILIES
from longspec.models.target import check_splits
from longspec.workflow.jobs.decoding_ranks import (
    OVERHEAD,
    Decoding,
    Machine,
    Target,
    machine_of,
    rank_bytes,
    ranks_of,
    read_target,
    target_of,
)

QWQ: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 152064,
}
LLAMA = QWQ | {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
NODE = Machine("evaluate", gpus=8, node_gres="gpu:8", gpu_mem=80_000)
# A GLIDE layer beside QwQ-32B, and an EAGLE-3 layer with a head of 32,000 tokens beside Llama-3.3-70B, roughly.
QWQ_DRAFT, LLAMA_DRAFT = 640_000_000, 1_500_000_000


def qwq() -> Target:
    return target_of(QWQ, 32_763_876_352)


def llama() -> Target:
    return target_of(LLAMA, 70_553_706_496)


def text(tokens: int, new: int = 1024, draft: int = 0) -> Decoding:
    return Decoding(tokens=tokens + new, forward=tokens, element=2, logits=new, nodes=69, draft=draft)


def test_memory_is_that_of_a_sum_by_hand() -> None:
    """A target of 32.76 billion weights on two ranks, with a text of 1,000 tokens and 24 more, without a draft."""
    weights = 2 * 32_763_876_352 // 2
    cache = 1024 * 64 * 2 * 8 * 128 * 2 // 2
    forward = 1000 * 2 * (4 * 5120 + 3 * 27648 // 2)
    wanted = weights + cache + forward + OVERHEAD
    assert rank_bytes(qwq(), Decoding(tokens=1024, forward=1000, element=2), 2) == wanted
    assert 35.0e9 < wanted < 35.4e9


@pytest.mark.parametrize(
    ("target", "tokens", "draft", "gpu_mem", "ranks"),
    [
        (qwq(), 4096, QWQ_DRAFT, 80_000, 1),
        (qwq(), 32_768, QWQ_DRAFT, 80_000, 2),
        (qwq(), 4096, QWQ_DRAFT, 24_000, 4),
        (llama(), 32_768, LLAMA_DRAFT, 80_000, 4),
        (llama(), 32_768, LLAMA_DRAFT, 140_000, 2),
    ],
)
def test_published_targets_take_the_fewest_ranks_that_hold_them(
    target: Target, tokens: int, draft: int, gpu_mem: int, ranks: int
) -> None:
    assert ranks_of("x", target, [text(tokens, draft=draft)], replace(NODE, gpu_mem=gpu_mem)) == ranks


def test_without_anything_to_estimate_from_there_is_one() -> None:
    assert ranks_of("x", None, [], NODE) == ranks_of("x", llama(), [text(1)], replace(NODE, gpu_mem=0)) == 1


def test_by_hand_stands_in_the_estimates_place() -> None:
    assert ranks_of("x", qwq(), [text(32_768)], replace(NODE, ranks=1)) == 1
    assert ranks_of("x", None, [], replace(NODE, ranks=2)) == 2
    with pytest.raises(ValueError, match=r"ranks: 3: x: ranks share its num_key_value_heads: 8, .*; give one of 1, 2, 4, 8$"):
        ranks_of("x", qwq(), [], replace(NODE, ranks=3))


def test_what_no_node_holds_is_refused_with_the_numbers() -> None:
    told = (
        r"^run 'a': needs 1\d\d\.\d GB on each of 1, 7\d\.\d GB on each of 2 GPUs, by an estimate; set-resources: evaluate: "
        r"gpu_mem has 40\.0 GB, a node 2 of them, and ranks share its num_key_value_heads: 8"
    )
    with pytest.raises(ValueError, match=told):
        ranks_of("run 'a'", llama(), [text(1024)], replace(NODE, gpus=2, gpu_mem=40_000))
    alone = target_of(QWQ | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}, 120_000_000_000)
    with pytest.raises(ValueError, match=r"on each of 1 GPUs, .* model_type 'gpt_oss' cannot be split over ranks"):
        ranks_of("x", alone, [text(64)], NODE)


SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**SHAPE),
    LlamaConfig(**SHAPE, tie_word_embeddings=True),
    MistralConfig(**SHAPE),
    Qwen2Config(**SHAPE),
    Qwen3Config(**SHAPE, head_dim=64),
    Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=64),
    Phi3Config(**SHAPE),
    GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=64),
    Olmo2Config(**SHAPE),
    Glm4Config(**SHAPE, head_dim=64),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_ranks_share_what_transformers_own_plan_shares(config: PretrainedConfig) -> None:
    """Its weights one by one, by the plan's word for each; and the numbers of ranks that are refused."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    target = target_of(config.to_dict(), sum(sizes.values()))
    for ranks in range(1, 9):
        try:
            check_splits(config, ranks, "t")
        except ValueError:
            assert ranks not in target.fitting(8) or ranks == 1
        else:
            assert ranks in target.fitting(16) or 16 % ranks, "other numbers are not taken"
    if target.fitting(8) == [1]:
        return
    shared = sum(size for name, size in sizes.items() if _is_shared(name, model.tp_plan))
    wanted = 2 * (sum(sizes.values()) - shared + shared / 4)
    nothing = Decoding(tokens=0, forward=0, element=2, nodes=0)
    assert rank_bytes(target, nothing, 4) - OVERHEAD == pytest.approx(wanted, rel=0.01)


def _is_shared(name: str, plan: dict[str, str]) -> bool:
    place = re.sub(r"\.\d+\.", ".*.", name)
    style = plan.get(place) or plan.get(place.rpartition(".")[0]) or ""
    return "colwise" in style or "rowwise" in style


def test_every_family_is_shown() -> None:
    assert {config.model_type for config in CONFIGS} == set(FAMILIES)


def test_weights_are_counted_by_their_files(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE)
    assert read_target(tmp_path) is None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    target = read_target(tmp_path)
    assert target is not None
    assert target.weights == pytest.approx(model.num_parameters(), rel=0.001)
    next(tmp_path.glob("*.safetensors")).unlink()
    assert read_target(tmp_path) is None, "as while it is fetched"


def test_the_machine_is_the_profiles() -> None:
    train = {"gres": "'gpu:h100:8'"}
    found = machine_of("answer", {"gpu_mem": "80000", "slurm_partition": "gpu"}, train)
    assert found == Machine("answer", 8, "", "gpu:h100:8", 80_000)
    assert (found.asked(1), found.asked(4)) == ("gpu:h100:1", "gpu:h100:4")
    assert machine_of("answer", {}, {"gres": "gpu:8"}).asked(2) == "gpu:2"
    assert machine_of("answer", {}, {}) == Machine("answer")
    assert Machine("answer").asked(2) == ""
    own = machine_of("answer", {"gres": "'gpu:a40:4'", "ranks": "2"}, train)
    assert (own.gpus, own.ranks, own.asked(2)) == (4, 2, "gpu:a40:4")
    with pytest.raises(ValueError, match=r"^set-resources: answer: ranks: 2 processes, .* gres of answer: gpu:1 has 1; lower"):
        machine_of("answer", {"gres": "gpu:1", "ranks": "2"}, train)
    with pytest.raises(ValueError, match=r"^set-resources: answer: ranks: 16 processes, .* gres of train: gpu:h100:8 has 8"):
        machine_of("answer", {"ranks": "16"}, train)
    for given in ("many", "-1", "1.5"):
        with pytest.raises(ValueError, match=f"^set-resources: answer: gpu_mem: {given} is no whole number"):
            machine_of("answer", {"gpu_mem": given}, train)
