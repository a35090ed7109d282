"""A row's derived numbers, against simulation, closed forms, the operating system, and a clock that stands still."""

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import Qwen2Config

from longspec import stopwatch
from longspec.config import Runtime, compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.replay import TrainedRows
from longspec.distributed import Ranks
from longspec.methods import method_of
from longspec.train.estimate import flops
from longspec.train.metrics import DATA, DRAFT, HELD_OUT, OPTIMIZER, OTHER, PHASES, SAVE, TARGET, Meter, Phases, expected_tokens
from longspec.train.micro_batches import StepBatches
from tests.corpus import Corpus


class States(nn.Module):
    """Stands in for what reads the target: it takes some seconds of a clock, and those of a part of it first."""

    def __init__(self, config: Any = None, clock: list[float] | None = None, seconds: float = 0, first: Any = None) -> None:
        super().__init__()
        self.config, self.clock, self.seconds, self.first = config, clock or [0.0], seconds, first

    def forward(self) -> None:
        """Let the time pass."""
        if self.first is not None:
            self.first()
        self.clock[0] += self.seconds


def test_expected_tokens_of_independent_guesses() -> None:
    right = np.random.default_rng(0).random((200_000, 4)) < 0.6
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    assert expected_tokens(0.6, 4) == pytest.approx(1 + accepted.mean(), abs=0.02)


def test_a_rows_numbers(corpus: Corpus) -> None:
    """Speed, operations of the whole global batch on both ranks, utilisation against both ranks' peak."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
    rows, recipe = PackedRows(corpus.answers), compose("train", ["run=demo", "recipe.global_batch=6"]).recipe
    ranks, runtime = Ranks(0, 0, 2), OmegaConf.structured(Runtime(peak_tflops=2.0))
    batches = StepBatches(TrainedRows(rows), recipe, 1, ranks, 4096)
    meter = Meter(batches, States(config), runtime, ranks, torch.device("cpu"), torch.float32)
    row = meter.numbers({"step": 3, "tokens": 600, "seconds": 1.5, "agreement": 0.5})
    numbers = [int(number) for number in batches.row_numbers(2)]
    documents = flops.document_lengths(rows, numbers)
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: time[0])
    return time


def test_every_second_belongs_to_the_phase_that_was_running(clock: list[float]) -> None:
    timeline = Phases(torch.device("cpu"))
    script = [(DATA, 1.0), (TARGET, 2.0), (DRAFT, 4.0), (OPTIMIZER, 8.0), (DATA, 16.0), (DRAFT, 32.0), (OTHER, 64.0)]
    clock[0] += 0.5
    for phase, seconds in script:
        timeline.now(phase)
        clock[0] += seconds
    expected = {DATA: 17.0, TARGET: 2.0, DRAFT: 36.0, OPTIMIZER: 8.0, SAVE: 0.0, HELD_OUT: 0.0, OTHER: 64.5}
    assert timeline.take() == expected
    assert list(expected) == list(PHASES)
    # A save, which comes after its step's row, is counted in the next, and goes on after it was counted.
    timeline.now(SAVE)
    clock[0] += 3.0
    assert timeline.take()[SAVE] == 3.0
    clock[0] += 2.0
    timeline.now(DATA)
    clock[0] += 1.0
    taken = timeline.take()
    assert (taken[SAVE], taken[DATA], sum(taken.values())) == (2.0, 1.0, 3.0)


def test_target_and_draft_are_told_apart_inside_one_forward(clock: list[float]) -> None:
    target = States(None, clock, 5.0)
    glide = States(None, clock, 7.0, target)
    timeline = Phases(torch.device("cpu"))
    timeline.watch(target)
    timeline.now(DATA)
    clock[0] += 1.0
    glide()
    clock[0] += 2.0  # the backward
    timeline.now(OTHER)
    taken = timeline.take()
    assert (taken[DATA], taken[TARGET], taken[DRAFT], taken[OTHER]) == (1.0, 5.0, 9.0, 0.0)
    with timeline.whole(HELD_OUT):
        glide()
        clock[0] += 1.0
    clock[0] += 3.0
    taken = timeline.take()
    assert (taken[HELD_OUT], taken[OTHER], sum(taken.values())) == (13.0, 3.0, 16.0)


@pytest.mark.gpu
def test_on_a_gpu_a_phase_is_what_it_costs_the_gpu() -> None:
    """Work that was only enqueued is counted, in the phase that enqueued it, and against the clock in total."""
    timeline = Phases(torch.device("cuda"))
    left = torch.randn(4096, 4096, device="cuda")
    (left @ left).sum().item()
    timeline.take()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    timeline.now(TARGET)
    for _ in range(50):
        left @ left
    timeline.now(DRAFT)
    left @ left
    end.record()
    taken = timeline.take()
    end.synchronize()
    assert taken[TARGET] > 20 * taken[DRAFT]
    assert sum(taken.values()) == pytest.approx(start.elapsed_time(end) / 1000, rel=0.1)
