"""Batches that are read in the background: which, when, and how it ends. Readers are held and let go by events."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.train.micro_batches import ReadAhead, StepBatches
from tests.corpus import Corpus
from tests.jobs import RECIPE
from tests.refusals import refused

CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds after which a test fails rather than hangs


class Held:
    """Stands in for packed rows and for stored states: a read begins when it is asked for, and ends when it is let go."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.begun, self.let_go = (tuple(threading.Event() for _ in range(9)) for _ in range(2))
        self.reads: list[int] = []
        self.states_of: list[int] = []
        self.fails_in = fails_in

    def micro_batches(self, step: int) -> list[np.ndarray]:
        """Two of one row each."""
        return [np.array([2 * step]), np.array([2 * step + 1])]

    def load(self, step: int, row_numbers: np.ndarray) -> dict[str, Any]:
        row = int(row_numbers[0])
        self.reads.append(row)
        self.begun[row].set()
        assert self.let_go[row].wait(PATIENCE)
        if row == self.fails_in:
            raise ValueError(f"rows.arrow: row {row}: torn")
        ids_11 = torch.tensor([[row]])
        return {"input_ids": ids_11, "row_numbers": torch.tensor([row]), "step": step}

    def prefetch(self, row_numbers: Sequence[int]) -> None:
        assert threads() == [threading.current_thread().name]
        self.states_of += [int(row) for row in row_numbers]


def reader_of(held: Held, steps: range) -> ReadAhead:
    return ReadAhead(held, held, steps, CPU)  # type: ignore[arg-type]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read ahead")]


def test_one_batch_is_read_while_the_one_before_computes_and_no_more() -> None:
    held = Held()
    with reader_of(held, range(1, 4)) as reader:
        for row in range(2, 8):
            assert held.begun[row].wait(PATIENCE)  # before it is asked for: the loop computes
            assert held.reads == list(range(2, row + 1))
            held.let_go[row].set()
            batch = reader.take()
            assert (batch["input_ids"].tolist(), batch["step"]) == ([[row]], row // 2)
            assert held.states_of == held.reads[: len(held.states_of)]
    assert held.reads == held.states_of == [2, 3, 4, 5, 6, 7]  # nothing behind the last step
    assert not threads()


def test_an_error_of_the_thread_is_raised_by_the_batch_that_it_befell() -> None:
    held = Held(fails_in=1)
    for event in held.let_go:
        event.set()
    reader = reader_of(held, range(2))
    with refused("rows.arrow: row 1"), reader:
        assert reader.take()["row_numbers"].tolist() == [0]
        assert held.begun[1].wait(PATIENCE)
        reader.take()
    assert held.reads == [0, 1]
    assert not threads()


@pytest.mark.gpu
def test_a_gpu_copies_batches_from_pinned_memory(corpus: Corpus) -> None:
    """With the draws, and the same values; the rows' numbers are left on the host."""
    batches = StepBatches(TrainedRows(PackedRows(corpus.packed)), compose("train", RECIPE).recipe, 2, Ranks(0, 0, 1), 400)
    wanted = batches.load(0, batches.micro_batches(0)[0])
    with ReadAhead(batches, Held(), range(1), torch.device("cuda")) as reader:
        found = reader.take()
    assert (found["input_ids"].device.type, found["row_numbers"].device.type) == ("cuda", "cpu")
    for name, value in wanted.items():
        assert value is None or torch.equal(found[name].cpu(), value)
