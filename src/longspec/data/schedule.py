"""Which rows an optimizer step trains: a function of (seed, step) alone, whatever ranks and micro batches share it."""

from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

NEWEST = 8  # steps whose rows stay in memory: a step is asked for its rows with each of its micro batches


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Whole global batches in one epoch. Raises ValueError when there is none."""
    if global_batch_size < 1 or num_rows < global_batch_size:
        raise ValueError(
            f"recipe.global_batch: {global_batch_size} rows in a step do not fit {num_rows} packed rows; "
            "lower global_batch or data.sequence_length, or bring more data"
        )
    return num_rows // global_batch_size


def shuffle(num_rows: int, entropy: list[int]) -> NDArray[np.int64]:
    """The permutation [num_rows] that numbers of at least 0 stand for."""
    # Sorting raw generator words: numpy promises these stay the same between versions, but not `permutation`'s result.
    words = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


class Schedule:
    """The rows of each global batch: a stage's own (source 0) and those it replays (sources 1, 2, ...), numbered through.

    num_rows: of each source. chances: of each source, that a row of a batch is its; their sum is 1. At every step each source
    has had its chance's part of all rows, to a row or two. Its rows are taken without replacement until it is used up, then
    again in another order. An epoch of the own rows leaves out what does not fill a whole global batch.
    Raises ValueError when the own rows do not fill one.
    """

    def __init__(self, num_rows: list[int], chances: list[float], global_batch_size: int, seed: int) -> None:
        own = steps_per_epoch(num_rows[0], global_batch_size) * global_batch_size
        self.num_rows, self.rows_an_epoch = num_rows, [own, *num_rows[1:]]
        self.global_batch_size, self.seed = global_batch_size, seed
        self.first_rows = [sum(num_rows[:source]) for source in range(len(num_rows))]
        self._shares_of_rest = [chance / sum(chances[source:]) for source, chance in enumerate(chances)]
        # A step looks at the present epoch of every source, now and then at the next one.
        self._order = lru_cache(maxsize=2 * len(num_rows))(self._shuffled)
        self._batch = lru_cache(maxsize=NEWEST)(self._batch_of)

    def taken(self, rows: int) -> list[int]:
        """How many of the stage's first `rows` rows are of each source; with `rows` no count falls."""
        counts = []
        # One source after the other is split off, since roundings of all at once could take a row back.
        for share in self._shares_of_rest[:-1]:
            counts.append(int(rows * share + 0.5))
            rows -= counts[-1]
        return [*counts, rows]

    def steps(self, epochs: int) -> int:
        """Optimizer steps in which the own rows are trained `epochs` times, as far as whole batches go."""
        wanted = self.rows_an_epoch[0] * epochs
        # No count strays from its chance by more than half a row.
        step = ceil((wanted + 1) / (self._shares_of_rest[0] * self.global_batch_size))
        while self.taken(step * self.global_batch_size)[0] > wanted:
            step -= 1
        return step

    def counts(self, step: int) -> list[int]:
        """How many rows of the 0-based step are of each source."""
        before, after = (self.taken(each * self.global_batch_size) for each in (step, step + 1))
        return [late - early for early, late in zip(before, after, strict=True)]

    def batch(self, step: int) -> NDArray[np.int64]:
        """Row numbers [global_batch_size] of the 0-based step."""
        return self._batch(step).copy()

    def _batch_of(self, step: int) -> NDArray[np.int64]:
        starts, counts = self.taken(step * self.global_batch_size), self.counts(step)
        return np.concatenate([self._rows_of(source, *place) for source, place in enumerate(zip(starts, counts, strict=True))])

    def _rows_of(self, source: int, start: int, count: int) -> NDArray[np.int64]:
        epochs_N, places_N = np.divmod(np.arange(start, start + count), self.rows_an_epoch[source])
        rows_N = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs_N).tolist():
            rows_N[epochs_N == epoch] = self._order(source, epoch)[places_N[epochs_N == epoch]]
        return rows_N + self.first_rows[source]

    def _shuffled(self, source: int, epoch: int) -> NDArray[np.int64]:
        return shuffle(self.num_rows[source], [self.seed, epoch, source] if source else [self.seed, epoch])


def chances(num_rows: list[int], labels: list[int], shares: list[float]) -> list[float]:
    """How often a row of each source is taken, that each source has its share of the trained tokens.

    labels: trained tokens of all rows of each source, at least one.
    """
    weights = [share * rows / trained for rows, trained, share in zip(num_rows, labels, shares, strict=True)]
    return [weight / sum(weights) for weight in weights]
