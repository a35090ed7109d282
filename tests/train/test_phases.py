"""The time of each phase, against a clock that stands still between the calls."""

import pytest
import torch
from torch import nn

from longspec import stopwatch
from longspec.train.phases import DATA, DRAFT, HELD_OUT, OPTIMIZER, OTHER, PHASES, SAVE, TARGET, Phases


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


def test_the_running_phase_goes_on_after_it_was_counted(clock: list[float]) -> None:
    """A save, which comes after its step's row, is counted in the next."""
    timeline = Phases(torch.device("cpu"))
    timeline.take()
    timeline.now(SAVE)
    clock[0] += 3.0
    assert timeline.take()[SAVE] == 3.0
    clock[0] += 2.0
    timeline.now(DATA)
    clock[0] += 1.0
    taken = timeline.take()
    assert (taken[SAVE], taken[DATA], sum(taken.values())) == (2.0, 1.0, 3.0)


def test_target_and_draft_are_told_apart_inside_one_forward(clock: list[float]) -> None:
    class Slow(nn.Module):
        def __init__(self, seconds: float, first: nn.Module | None = None) -> None:
            super().__init__()
            self.seconds, self.first = seconds, first

        def forward(self) -> None:
            if self.first is not None:
                self.first()
            clock[0] += self.seconds

    target = Slow(5.0)
    glide = Slow(7.0, target)
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
