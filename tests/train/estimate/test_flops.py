"""Closed forms against torch's counter of what really ran, and the numbers that a step's row derives from them."""

from itertools import cycle

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from longspec.config import Runtime, compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.methods import method_of
from longspec.methods.glide import method as glide_method
from longspec.methods.glide.method import METHOD
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, class_for
from longspec.models.attention.visibility import Visibility
from longspec.states.forward import depth_of
from longspec.train.estimate import flops
from longspec.train.metrics import costs_of
from longspec.train.micro_batches import StepBatches
from tests.corpus import Corpus
from tests.eager import EAGER
from tests.methods.test_glide import seen
from tests.targets import states_of

SHAPES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPES, num_key_value_heads=2),
    "llama with wide heads": LlamaConfig(**SHAPES, num_key_value_heads=1, head_dim=12),
    "qwen3 without groups": Qwen3Config(**SHAPES, num_key_value_heads=4, head_dim=16),
}
B, S = 2, 24


@pytest.fixture
def every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of a row is taken for seen: eager attention computes the hidden ones too."""
    for module, name in ((flops, "causal_pairs"), (glide_method, "causal_pairs"), (glide_method, "block_pairs")):
        monkeypatch.setattr(module, name, lambda length, *_, **__: length * length)


def glide_of(config: PretrainedConfig, draft: Draft) -> Glide:
    return class_for(config.model_type)(config, "", draft=draft, states=states_of(config, attention=EAGER))


def measured(config: PretrainedConfig, draft: Draft, labels: torch.Tensor, *, with_llm_loss: bool) -> int:
    """What a forward and backward of target and draft really multiply."""
    glide, lag = glide_of(config, draft), "blocks" if draft.lag_mode == "blocks" else draft.lag
    with FlopCounterMode(display=False) as counter:
        glide(torch.randint(97, (B, S)), labels, lag=lag, with_llm_loss=with_llm_loss).loss.backward()
    return counter.get_total_flops()


def counted(config: PretrainedConfig, draft: Draft, labels: int, *, with_llm_loss: bool = True) -> flops.Operations:
    """The same in closed form."""
    return flops.operations(config, METHOD, draft, B * S, [S] * B, labels, with_llm_loss=with_llm_loss)


@pytest.mark.usefixtures("every_pair")
@pytest.mark.parametrize(("name", "kind"), list(zip(CONFIGS, ["hard", "soft", "soft"], strict=True)))
def test_a_step_is_counted_as_torch_counts_it(name: str, kind: str) -> None:
    config, draft = CONFIGS[name], Draft(anchors="off", lag_mode="fixed", lag=2, window=5, loss=kind)
    labels = torch.randint(97, (B, S))
    labels[:, ::3] = -100
    trained = int((labels[:, 1:] != -100).sum())
    assert measured(config, draft, labels, with_llm_loss=True) == sum(counted(config, draft, trained))


@pytest.mark.usefixtures("every_pair")
def test_hard_labels_without_the_targets_loss_leave_the_end_of_the_target_out() -> None:
    config, draft = CONFIGS["qwen2"], Draft(anchors="off", lag_mode="blocks", block=4, loss="hard")
    labels = torch.randint(97, (B, S))
    without, whole = (counted(config, draft, B * (S - 1), with_llm_loss=loss) for loss in (False, True))
    assert measured(config, draft, labels, with_llm_loss=False) == sum(without)
    assert without.target < whole.target
    assert without.draft == whole.draft
    assert without.head == whole.head * 2 / 3


NAMES: list[list[str]] = [[], ["keys.0"], ["keys.1", "hidden.0"], ["hidden.2", "values.1"], ["values.2"], ["final", "hidden.1"]]


@pytest.mark.parametrize(("names", "name"), list(zip(NAMES, cycle(CONFIGS), strict=False)))
def test_the_targets_forward_is_counted_as_deep_as_it_runs(name: str, names: list[str]) -> None:
    """Exactly, with the pairs that eager attention computes."""
    config = CONFIGS[name]
    glide = glide_of(config, Draft(anchors="off", lag_mode="fixed"))
    depth = depth_of(names, SHAPES["num_hidden_layers"])
    with FlopCounterMode(display=False) as counter:
        glide.states(torch.randint(97, (B, S)), torch.arange(S).expand(B, S), None, names)
    assert counter.get_total_flops() == flops.target_operations(config, B * S, depth[0] * B * S * S, *depth)


@pytest.mark.usefixtures("every_pair")
def test_only_the_chosen_experts_are_counted() -> None:
    """torch does not count the experts' grouped products at all; the rest agrees."""
    config, draft = Qwen3MoeConfig(**SHAPES, **EXPERTS, num_key_value_heads=2), Draft(anchors="off", lag_mode="fixed", lag=1)
    labels = torch.randint(97, (B, S))
    experts = 2 * B * S * 3 * (3 * 32 * 20) * 2  # tokens, layers, SwiGLU, two experts each
    expected = sum(counted(config, draft, B * (S - 1)))
    assert expected - measured(config, draft, labels, with_llm_loss=True) == experts


def test_the_targets_documents_do_not_see_each_other_and_layers_may_have_windows() -> None:
    ids = torch.tensor([[0] * 9 + [1] * 20 + [-1] * 3])
    masks = Visibility(document_ids_BT=ids).bounds_BS(32, 32, torch.device("cpu"))
    plain = int((masks[1] - masks[0] + 1).clamp(min=0).sum())
    assert flops.target_pairs([9, 20], CONFIGS["qwen2"], 3) == 3 * plain
    mistral = MistralConfig(**SHAPES, num_key_value_heads=2, sliding_window=6)
    windowed = seen(9, window=5) + seen(20, window=5)
    assert flops.target_pairs([9, 20], mistral, 3) == 3 * windowed
    mixed = Qwen2Config(**SHAPES, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    pairs = [flops.target_pairs([9, 20], mixed, layers) for layers in range(4)]
    assert pairs == [0, plain, plain + windowed, plain + 2 * windowed]


def test_the_documents_of_packed_rows(corpus: Corpus) -> None:
    rows = PackedRows(corpus.packed)
    spans = []
    for number in range(10):
        ids = rows[number].document_ids_S.tolist()
        spans += [ids.count(document) for document in sorted(set(ids) - {-1})]
    assert flops.document_lengths(rows, range(10)) == spans


def test_a_rows_numbers(corpus: Corpus) -> None:
    """Speed, operations of the whole global batch on both ranks, utilisation against both ranks' peak."""
    config, rows = CONFIGS["qwen2"], PackedRows(corpus.answers)
    recipe = compose("train", ["run=demo", "recipe.global_batch=6"]).recipe
    ranks, runtime = Ranks(0, 0, 2), OmegaConf.structured(Runtime(peak_tflops=2.0))
    batches = StepBatches(TrainedRows(rows), recipe, 1, ranks, 4096)
    made = {"step": 3, "tokens": 6 * rows.sequence_length, "seconds": 1.5}
    row = costs_of(made, batches, config, runtime, torch.device("cpu"), torch.float32)
    numbers = [int(number) for number in batches.row_numbers(2)]
    documents = flops.document_lengths(rows, numbers)
    assert sum(documents) < 6 * rows.sequence_length  # some padding
    labels = sum(int(rows[n].loss_mask_S.sum()) for n in numbers)
    method, settings = method_of(recipe)
    tokens = 6 * rows.sequence_length
    expected = sum(flops.operations(config, method, settings, tokens, documents, labels, with_llm_loss=True))
    assert row["flops"] == expected
    assert row["mfu"] == pytest.approx(expected / 1.5 / 4e12)
    assert row["tokens_per_second"] == 4 * rows.sequence_length
    assert row["peak_rss_bytes"] > 2**20


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpus_peak_is_that_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch, device: str, tflops: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    assert flops.peak(torch.device("cuda"), torch.bfloat16, None) == (None if tflops is None else tflops * 1e12)
