"""The schedule: an epoch is a permutation, replayed sources keep their shares, and a step needs none before it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from omegaconf import OmegaConf

from longspec.data.replay import Schedule
from longspec.distributed import Ranks, share_global_batch
from longspec.methods.glide.settings import Draft, Method
from longspec.train.micro_batches import StepBatches

DRAFT = OmegaConf.structured(Draft(anchors="off", lag_mode="fixed"))
SOURCES = st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 1)), min_size=1, max_size=4)


def global_batch(num_rows: int, size: int, seed: int, step: int) -> NDArray[np.int64]:
    """The rows of a step of a stage that replays none."""
    return Schedule([num_rows], [1.0], size, seed).batch(step)


@given(
    num_rows=st.integers(24, 400),
    world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    micro=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    step=st.integers(0, 10**6),
)
def test_ranks_share_the_same_global_batch(num_rows: int, world: int, micro: int, seed: int, step: int) -> None:
    """However many processes there are and however many rows each takes at once: together the same rows, none twice."""
    recipe = SimpleNamespace(global_batch=24, seed=seed, method=Method(), draft=DRAFT, data=SimpleNamespace(replay={}))
    largest, accumulation = share_global_batch(24, micro, world)
    shares = []
    for rank in range(world):
        rows: Any = SimpleNamespace(schedule=lambda _, size, seed: Schedule([num_rows], [1.0], size, seed))
        taken = StepBatches(rows, recipe, largest, Ranks(rank, rank, world), 1).micro_batches(step)
        assert [len(rows) for rows in taken] == [largest] * accumulation
        shares += [row for rows in taken for row in rows.tolist()]
    assert sorted(shares) == sorted(global_batch(num_rows, 24, seed, step).tolist())


@given(num_rows=st.integers(1, 200), seed=st.integers(0, 2**32), step=st.integers(0, 5000))
def test_against_a_plain_shuffle(num_rows: int, seed: int, step: int) -> None:
    """The same as sorting the rows by the generator's words, one row a step."""
    epoch, place = divmod(step, num_rows)
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows).tolist()
    assert global_batch(num_rows, 1, seed, step).tolist() == [sorted(range(num_rows), key=words.__getitem__)[place]]


@given(sources=SOURCES, size=st.integers(1, 20), seed=st.integers(0, 2**63 - 1), first=st.integers(0, 10**6))
def test_every_source_keeps_to_its_chance_and_is_used_up_before_it_repeats(
    sources: list[tuple[int, float]], size: int, seed: int, first: int
) -> None:
    """Counted row by row over stretches of steps, against the plain definition."""
    num_rows = [size + sources[0][0], *(rows for rows, _ in sources[1:])]
    weights = [weight for _, weight in sources]
    wanted = [weight / sum(weights) for weight in weights]
    schedule, edges = Schedule(num_rows, wanted, size, seed), np.cumsum([0, *num_rows])
    for step in (0, first):
        taken = [schedule.taken(step * size), schedule.taken((step + 1) * size)]
        rows = schedule.batch(step)
        assert len(rows) == size
        found = Counter(np.searchsorted(edges, rows, side="right") - 1)
        assert [found[source] for source in range(len(num_rows))] == [b - a for a, b in zip(*taken, strict=True)]
        for counts, total in zip(taken, (step * size, (step + 1) * size), strict=True):
            assert sum(counts) == total
            assert all(abs(count - chance * total) <= 2 for count, chance in zip(counts, wanted, strict=True))
    in_order = np.concatenate([schedule.batch(step) for step in range(60)])
    for source, rows in enumerate(num_rows):
        own = in_order[(in_order >= edges[source]) & (in_order < edges[source + 1])].tolist()
        whole = rows if source else rows // size * size
        for start in range(0, len(own), whole):
            assert len(set(own[start : start + whole])) == len(own[start : start + whole])
    other = Schedule(num_rows, wanted, size, seed)
    assert other.batch(first).tolist() == schedule.batch(first).tolist()


@given(rows=st.integers(1, 200), size=st.integers(1, 16), epochs=st.integers(1, 5), share=st.floats(0.01, 0.99))
def test_steps_pass_over_the_own_rows_so_many_times(rows: int, size: int, epochs: int, share: float) -> None:
    rows += size
    schedule = Schedule([rows, 50], [1 - share, share], size, 3)
    own, steps = rows // size * size * epochs, schedule.steps(epochs)
    assert schedule.taken(steps * size)[0] <= own < schedule.taken((steps + 1) * size)[0]


def test_the_rows_are_pinned() -> None:
    """A resumed run must meet the rows of the run it continues, also after an upgrade of numpy."""
    schedule = Schedule([10, 6, 3], [0.5, 0.3, 0.2], 5, 42)
    assert [schedule.batch(step).tolist() for step in (0, 1, 7)] == PINNED
    assert global_batch(10, 10, 42, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


PINNED = [[4, 8, 1, 15, 18], [9, 3, 14, 12, 17], [4, 7, 12, 14, 18]]


def test_own_rows_that_fill_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="global_batch: 8 rows in a step do not fit 5"):
        Schedule([5, 100], [0.5, 0.5], 8, 0)
