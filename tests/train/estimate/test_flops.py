"""Closed forms against torch's counter of what really ran, and the pairs of attention against the masks themselves."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longspec.data.pack.arrow_shards import PackedRows
from longspec.methods.glide import attach
from longspec.methods.glide.settings import Draft
from longspec.models.attention.visibility import Visibility
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.estimate import flops
from longspec.train.estimate.flops import Pairs
from tests.corpus import Corpus

SHAPES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPES, num_key_value_heads=2),
    "llama with wide heads": LlamaConfig(**SHAPES, num_key_value_heads=1, head_dim=12),
    "qwen3 without groups": Qwen3Config(**SHAPES, num_key_value_heads=4, head_dim=16),
}
B, S = 2, 24


def measured(config: PretrainedConfig, draft: Draft, labels: torch.Tensor, *, with_llm_loss: bool) -> int:
    """What a forward and backward of target and draft really multiply. Eager attention computes the hidden pairs too."""
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION).requires_grad_(False).eval()
    family = next(cls for cls in attach.CLASSES if config.model_type in cls.families)
    glide = family(config, "", draft=draft, states=TargetStates(target, attention="eager"))
    lag = "blocks" if draft.lag_mode == "blocks" else draft.lag
    with FlopCounterMode(display=False) as counter:
        glide(torch.randint(97, (B, S)), labels, lag=lag, with_llm_loss=with_llm_loss).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_step_is_counted_as_torch_counts_it(name: str, kind: str) -> None:
    """Exactly, with every pair of a row taken for seen, as eager attention computes it."""
    config, draft = CONFIGS[name], Draft(anchors="off", lag_mode="fixed", lag=2, window=5, loss=kind)
    labels = torch.randint(97, (B, S))
    labels[:, ::3] = -100
    trained = int((labels[:, 1:] != -100).sum())
    dense = Pairs(SHAPES["num_hidden_layers"] * B * S * S, B * S * S, B * S * S)
    expected = (
        flops.target_operations(config, B * S, dense.target)
        + flops.draft_operations(config, B * S, dense)
        + flops.head_operations(config, trained, with_teacher=True)
    )
    assert measured(config, draft, labels, with_llm_loss=True) == expected


def test_hard_labels_without_the_targets_loss_leave_the_end_of_the_target_out() -> None:
    config, draft = CONFIGS["qwen2"], Draft(anchors="off", lag_mode="blocks", block=4, loss="hard")
    labels = torch.randint(97, (B, S))
    dense = Pairs((SHAPES["num_hidden_layers"] - 1) * B * S * S, B * S * S, B * S * S)
    expected = (
        flops.target_operations(config, B * S, dense.target, keys_only=True)
        + flops.draft_operations(config, B * S, dense)
        + flops.head_operations(config, B * (S - 1), with_teacher=False)
    )
    assert measured(config, draft, labels, with_llm_loss=False) == expected
    without, whole = (flops.operations(config, draft, B * S, [S] * B, 7, with_target_loss=loss) for loss in (False, True))
    assert without.target < whole.target
    assert without.head == whole.head * 2 / 3


def test_only_the_chosen_experts_are_counted() -> None:
    """torch does not count the experts' grouped products at all; the rest agrees."""
    config, draft = Qwen3MoeConfig(**SHAPES, **EXPERTS, num_key_value_heads=2), Draft(anchors="off", lag_mode="fixed", lag=1)
    labels = torch.randint(97, (B, S))
    dense = Pairs(3 * B * S * S, B * S * S, B * S * S)
    expected = (
        flops.target_operations(config, B * S, dense.target)
        + flops.draft_operations(config, B * S, dense)
        + flops.head_operations(config, B * (S - 1), with_teacher=True)
    )
    experts = 2 * B * S * 3 * (3 * 32 * 20) * 2  # tokens, layers, SwiGLU, two experts each
    assert expected - measured(config, draft, labels, with_llm_loss=True) == experts


def seen(length: int, **visibility: Any) -> int:
    """Pairs the masks leave, counted one by one."""
    first_BS, last_BS = Visibility(**visibility).bounds_BS(length, length, torch.device("cpu"))
    return int((last_BS - first_BS + 1).clamp(min=0).sum())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 30])
def test_pairs_are_those_the_masks_leave(length: int) -> None:
    assert flops.causal_pairs(length) == seen(length)
    for window in (0, 1, 5, 8, 40):
        assert flops.causal_pairs(length, window) == seen(length, window=window)
    for lag in (1, 2, 4, 31):
        assert flops.causal_pairs(length, lag=lag) == seen(length, lag_B=torch.tensor([lag]))
        assert flops.causal_pairs(length, 5, lag) == seen(length, window=5, lag_B=torch.tensor([lag]))
    for block in (1, 4, 9):
        assert flops.block_pairs(length, block) == seen(length, lag_blocks=block)


def test_random_lags_count_as_their_mean() -> None:
    every = [seen(30, lag_B=torch.tensor([lag])) for lag in (1, 2, 3, 4)]
    assert flops.cross_pairs(30, Draft(anchors="off", lag_mode="random", lag=4)) == sum(every) / 4
    assert flops.cross_pairs(30, Draft(anchors="off", lag_mode="fixed", lag=4)) == every[3]


def test_documents_do_not_see_each_other_and_layers_may_have_windows() -> None:
    draft = Draft(anchors="off", lag_mode="blocks", block=4, window=5)
    ids = torch.tensor([[0] * 9 + [1] * 20 + [-1] * 3])
    masks = Visibility(document_ids_BT=ids).bounds_BS(32, 32, torch.device("cpu"))
    plain = int((masks[1] - masks[0] + 1).clamp(min=0).sum())
    assert flops.pairs_of([9, 20], CONFIGS["qwen2"], draft).target == 3 * plain
    mistral = MistralConfig(**SHAPES, num_key_value_heads=2, sliding_window=6)
    windowed = seen(9, window=5) + seen(20, window=5)
    pairs = flops.pairs_of([9, 20], mistral, draft)
    assert pairs == Pairs(3 * windowed, windowed, seen(9, lag_blocks=4) + seen(20, lag_blocks=4))
    mixed = Qwen2Config(**SHAPES, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert flops.pairs_of([9, 20], mixed, draft).target == plain + 2 * windowed


def test_the_documents_of_packed_rows(corpus: Corpus) -> None:
    rows = PackedRows(corpus.packed)
    for number in range(10):
        spans, ids = [], rows[number].document_ids_S.tolist()
        for document in sorted(set(ids) - {-1}):
            spans.append(ids.count(document))
        assert flops.document_lengths(rows, [number]) == spans
    assert flops.document_lengths(rows, [3, 5]) == flops.document_lengths(rows, [3]) + flops.document_lengths(rows, [5])


def test_the_peak_is_what_was_configured_or_what_a_product_reaches() -> None:
    cpu = torch.device("cpu")
    assert flops.peak(cpu, torch.float32, 12.5) == (12.5e12, "runtime.peak_tflops")
    rate, why = flops.peak(cpu, torch.float32, None)
    assert why == "measured on a product of matrices in torch.float32"
    assert math.isfinite(rate)
    assert rate > 1e8


def test_known_gpus_have_their_data_sheets_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
    for name, rate in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert flops.peak(torch.device("cuda"), torch.bfloat16, None)[0] == rate
