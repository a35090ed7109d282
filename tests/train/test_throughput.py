"""A row's derived numbers, against simulation, closed forms and what the operating system says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config

from longspec.config import Runtime, compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.replay import TrainedRows
from longspec.distributed import Ranks
from longspec.methods import method_of
from longspec.train.estimate import flops
from longspec.train.lifetime.lifetime import Unwatched
from longspec.train.micro_batches import StepBatches
from longspec.train.phases import DATA, DRAFT, PHASES, TARGET
from longspec.train.throughput import Meter, expected_tokens, peak_memory
from tests.corpus import Corpus


class States(torch.nn.Module):
    """Stands in for what reads the target."""

    def __init__(self, config: Qwen2Config | None) -> None:
        super().__init__()
        self.config = config

    def forward(self) -> None:
        """Nothing."""


class Heard(Unwatched):
    """Keeps the places that it hears of."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def passed(self, place: str) -> None:
        self.places.append(place)


@pytest.mark.parametrize(("agreement", "drafted"), [(0.6, 4), (0.9, 5), (0.0, 3), (1.0, 4)])
def test_expected_tokens_of_independent_guesses(agreement: float, drafted: int) -> None:
    generator = np.random.default_rng(0)
    right = generator.random((200_000, drafted)) < agreement
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    assert expected_tokens(agreement, drafted) == pytest.approx(1 + accepted.mean(), abs=0.02)
    if agreement < 1:
        assert expected_tokens(agreement, drafted) == pytest.approx((1 - agreement ** (drafted + 1)) / (1 - agreement))


def test_no_agreement_no_estimate() -> None:
    assert expected_tokens(None, 4) is None


def test_memory_of_a_process_is_the_operating_systems_peak() -> None:
    before = peak_memory(torch.device("cpu"))["peak_rss_bytes"]
    size = before + 2**26
    block = torch.ones(size // 4)
    after = peak_memory(torch.device("cpu"))["peak_rss_bytes"]
    assert after >= block.numel() * 4
    assert after < before + 1.2 * size
    with open("/proc/self/status") as status:  # noqa: PTH123 - no file
        high = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    assert after == pytest.approx(high, rel=0.05)


def test_a_rows_numbers(corpus: Corpus) -> None:
    """Speed, operations of the whole global batch on both ranks, utilisation against both ranks' peak."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
    rows, recipe = PackedRows(corpus.answers), compose("train", ["run=demo", "recipe.global_batch=6"]).recipe
    ranks, runtime = Ranks(0, 0, 2), OmegaConf.structured(Runtime(peak_tflops=2.0))
    batches = StepBatches(TrainedRows(rows), recipe, 1, ranks, 4096)
    meter = Meter(batches, States(config), runtime, ranks, torch.device("cpu"), torch.float32, Unwatched())
    row = meter.numbers({"step": 3, "tokens": 600, "seconds": 1.5, "agreement": 0.5})
    numbers = [int(number) for number in batches.row_numbers(2)]
    documents = [length for number in numbers for length in spans(rows, number)]
    assert sum(documents) < 6 * rows.sequence_length  # some padding
    labels = sum(int(rows[n].loss_mask_S.sum()) for n in numbers)
    method, settings = method_of(recipe)
    tokens = 6 * rows.sequence_length
    expected = flops.operations(config, method, settings, tokens, documents, labels, with_llm_loss=True).total
    assert row["flops"] == expected
    assert row["mfu"] == pytest.approx(expected / 1.5 / 4e12)
    assert row["tokens_per_second"] == 400.0
    assert row["expected_tokens"] == expected_tokens(0.5, recipe.draft.lag)
    assert tuple(row["phases"]) == PHASES
    assert row["data_seconds"] == row["phases"][DATA]
    assert row["peak_rss_bytes"] > 2**20


def spans(rows: PackedRows, number: int) -> list[int]:
    """The documents' lengths in a row, by walking along it."""
    lengths, before = [], -1
    for document in rows[number].document_ids_S:
        if document >= 0:
            if document == before:
                lengths[-1] += 1
            else:
                lengths.append(1)
        before = document
    return lengths


def test_other_ranks_measure_nothing_and_keep_nothing(corpus: Corpus) -> None:
    batches = SimpleNamespace()
    runtime, states, life = OmegaConf.structured(Runtime()), States(None), Heard()
    meter = Meter(batches, states, runtime, Ranks(1, 1, 2), torch.device("cpu"), torch.float32, life)  # type: ignore[arg-type]
    for _ in range(100):
        meter.phases.now(DATA)
        states()
    assert len(meter.phases._clock.marks) == 1  # nobody takes them there
    assert life.places == [DATA, TARGET, DRAFT] * 100  # the watchdog hears of them there too
