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

from longspec.data.schedule import Schedule
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
    recipe = SimpleNamespace(
        global_batch=24, seed=seed, method=Method(), draft=DRAFT, data=SimpleNamespace(name="a", replay={})
    )
    largest, accumulation = share_global_batch(24, micro, world)
    shares = []
    for rank in range(world):
        rows: Any = SimpleNamespace(schedule=lambda _, size, seed: Schedule([num_rows], [1.0], size, seed))
        taken = StepBatches(rows, recipe, largest, Ranks(rank, rank, world), 1).micro_batches(step)
        assert [len(rows) for rows in taken] == [largest] * accumulation
        shares += [row for rows in taken for row in rows.tolist()]
    assert sorted(shares) == sorted(global_batch(num_rows, 24, seed, step).tolist())


@given(
    sources=SOURCES, own=st.integers(1, 4), size=st.integers(1, 20), seed=st.integers(0, 2**63 - 1), first=st.integers(0, 10**6)
)
def test_every_source_keeps_to_its_chance_and_is_used_up_before_it_repeats(
    sources: list[tuple[int, float]], own: int, size: int, seed: int, first: int
) -> None:
    """Counted row by row over stretches of steps; the rows of each source against plain shuffles, one after another."""
    num_rows = [size + sources[0][0], *(rows for rows, _ in sources[1:])]
    weights = [weight for _, weight in sources]
    wanted = [weight / sum(weights) for weight in weights]
    own = min(own, len(sources))
    schedule, edges = Schedule(num_rows, wanted, size, seed, own), np.cumsum([0, *num_rows])
    for step in (0, first):
        taken = [schedule.taken(step * size), schedule.taken((step + 1) * size)]
        rows = schedule.batch(step)
        assert len(rows) == size
        found = Counter(np.searchsorted(edges, rows, side="right") - 1)
        assert [found[source] for source in range(len(num_rows))] == [b - a for a, b in zip(*taken, strict=True)]
        for counts, total in zip(taken, (step * size, (step + 1) * size), strict=True):
            assert sum(counts) == total
            assert all(abs(count - chance * total) <= 2 for count, chance in zip(counts, wanted, strict=True))
    in_order = np.concatenate([schedule.batch(step) for step in range(20)])
    for source, rows in enumerate(num_rows):
        found_rows = in_order[(in_order >= edges[source]) & (in_order < edges[source + 1])] - edges[source]
        whole = rows if source or own > 1 else rows // size * size
        plain: list[int] = []
        while len(plain) < len(found_rows):
            entropy = [seed, len(plain) // whole, source][: 3 if source else 2]
            words = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(rows).tolist()
            plain += sorted(range(rows), key=words.__getitem__)[:whole]
        assert found_rows.tolist() == plain[: len(found_rows)]
    other = Schedule(num_rows, wanted, size, seed, own)
    assert other.batch(first).tolist() == schedule.batch(first).tolist()


@given(
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    size=st.integers(1, 16),
    epochs=st.integers(1, 5),
    share=st.floats(0, 0.99),
)
def test_an_epoch_has_as_many_own_rows_as_there_are(rows: list[int], size: int, epochs: int, share: float) -> None:
    """Of one data set or several, in whatever shares, with replayed rows on top or none."""
    rows[0], own = rows[0] + size, len(rows)
    parts = [(1 - share) / sum(range(1, own + 1)) * place for place in range(1, own + 1)]
    replayed = [(50, share)] if share else []
    num_rows, wanted = [*rows, *(n for n, _ in replayed)], [*parts, *(part for _, part in replayed)]
    schedule = Schedule(num_rows, wanted, size, 3, own)
    whole, steps = sum(rows) // size * size * epochs, schedule.steps(epochs)
    assert sum(schedule.taken(steps * size)[:own]) <= whole < sum(schedule.taken((steps + 1) * size)[:own])


def test_the_rows_are_pinned() -> None:
    """A resumed run must meet the rows of the run it continues, also after an upgrade of numpy."""
    schedule = Schedule([10, 6, 3], [0.5, 0.3, 0.2], 5, 42)
    assert [schedule.batch(step).tolist() for step in (0, 1, 7)] == PINNED
    assert global_batch(10, 10, 42, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


PINNED = [[4, 8, 1, 15, 18], [9, 3, 14, 12, 17], [4, 7, 12, 14, 18]]


def test_own_rows_that_fill_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="global_batch: 8 rows in a step do not fit 5"):
        Schedule([5, 100], [0.5, 0.5], 8, 0)
