"""The rows that a stage trains on, its own and those of earlier stages that it replays (recipe.data.replay), and when.

Which rows an optimizer step trains is a function of (seed, step) alone, whatever ranks and micro batches share it.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longspec.data.pack.arrow_shards import PackedRows, Row, count_labels


class Schedule:
    """The rows of each global batch: a stage's own (source 0) and those it replays (sources 1, 2, ...), numbered through.

    num_rows: of each source. chances: of each source, that a row of a batch is its; their sum is 1. At every step each source
    has had its chance's part of all rows, to a row or two. Its rows are taken without replacement until it is used up, then
    again in another order. An epoch of the own rows leaves out what does not fill a whole global batch.
    Raises ValueError when the own rows do not fill one.
    """

    def __init__(self, num_rows: list[int], chances: list[float], global_batch_size: int, seed: int) -> None:
        if num_rows[0] < global_batch_size:
            raise ValueError(
                f"recipe.global_batch: {global_batch_size} rows in a step do not fit {num_rows[0]} packed rows; "
                "lower global_batch or data.sequence_length, or bring more data"
            )
        self.num_rows, self.rows_an_epoch = num_rows, [num_rows[0] // global_batch_size * global_batch_size, *num_rows[1:]]
        self.global_batch_size, self.seed = global_batch_size, seed
        self.first_rows = [sum(num_rows[:source]) for source in range(len(num_rows))]
        self._shares_of_rest = [chance / sum(chances[source:]) for source, chance in enumerate(chances)]
        # A step looks at the present epoch of every source, now and then at the next one.
        self._order = lru_cache(maxsize=2 * len(num_rows))(self._shuffled)

    def taken(self, rows: int) -> list[int]:
        """Return how many of the stage's first `rows` rows are of each source; with `rows` no count falls."""
        counts = []
        # One source after the other is split off, since roundings of all at once could take a row back.
        for share in self._shares_of_rest[:-1]:
            counts.append(int(rows * share + 0.5))
            rows -= counts[-1]
        return [*counts, rows]

    def steps(self, epochs: int) -> int:
        """Return the optimizer steps in which the own rows are trained `epochs` times, as far as whole batches go."""
        wanted = self.rows_an_epoch[0] * epochs
        # No count strays from its chance by more than half a row.
        step = ceil((wanted + 1) / (self._shares_of_rest[0] * self.global_batch_size))
        while self.taken(step * self.global_batch_size)[0] > wanted:
            step -= 1
        return step

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the row numbers [global_batch_size] of the 0-based step."""
        starts, ends = (self.taken(each * self.global_batch_size) for each in (step, step + 1))
        return np.concatenate([self._rows_of(source, *edges) for source, edges in enumerate(zip(starts, ends, strict=True))])

    def _rows_of(self, source: int, start: int, end: int) -> NDArray[np.int64]:
        epochs_N, places_N = np.divmod(np.arange(start, end), self.rows_an_epoch[source])
        rows_N = np.empty(end - start, dtype=np.int64)
        for epoch in np.unique(epochs_N).tolist():
            rows_N[epochs_N == epoch] = self._order(source, epoch)[places_N[epochs_N == epoch]]
        return rows_N + self.first_rows[source]

    def _shuffled(self, source: int, epoch: int) -> NDArray[np.int64]:
        entropy = [self.seed, epoch, source] if source else [self.seed, epoch]
        # Sorting raw generator words: numpy promises these stay the same between versions, but not `permutation`'s result.
        return np.argsort(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(self.num_rows[source]), kind="stable")


def chances(num_rows: list[int], labels: list[int], shares: list[float]) -> list[float]:
    """Return how often a row of each source is taken, that each source has its share of the trained tokens.

    labels: trained tokens of all rows of each source, at least one.
    """
    weights = [share * rows / trained for rows, trained, share in zip(num_rows, labels, shares, strict=True)]
    return [weight / sum(weights) for weight in weights]


class TrainedRows:
    """A stage's own packed rows and replayed ones as one, numbered through: the own first, then by the stages' names."""

    def __init__(self, own: PackedRows, replayed: Mapping[str, PackedRows] | None = None) -> None:
        self.own, self.replayed = own, dict(sorted((replayed or {}).items()))
        self.sequence_length = own.sequence_length
        self.sources = [own, *self.replayed.values()]
        self._edges = np.cumsum([0, *map(len, self.sources)]).tolist()

    def __len__(self) -> int:
        return int(self._edges[-1])

    def source_of(self, row: int) -> tuple[int, int]:
        """Return the place of a row's source, 0 for the own, and the row's number there."""
        source = bisect_right(self._edges, int(row)) - 1
        if not 0 <= source < len(self.sources):
            raise IndexError(f"{self.own.path}: row {row} of {len(self)}")
        return source, int(row) - self._edges[source]

    def find(self, row: int) -> tuple[pa.RecordBatch, int]:
        """Return the record batch that holds a row, and the row's place in it."""
        source, number = self.source_of(row)
        return self.sources[source].find(number)

    def __getitem__(self, row: int) -> Row:
        source, number = self.source_of(row)
        return self.sources[source][number]

    def labels_by_name(self, rows: NDArray[np.int64]) -> dict[str, int]:
        """Count the trained tokens in some of the replayed rows, by the stage that they are of."""
        found = dict.fromkeys(self.replayed, 0)
        names = list(self.replayed)
        for row in rows:
            source, _ = self.source_of(row)
            if source:
                found[names[source - 1]] += count_labels(self.find, [row])
        return found

    def schedule(self, shares: Mapping[str, float], global_batch_size: int, seed: int) -> Schedule:
        """Return the rows of each step. shares: of the trained tokens, by the names of the replayed stages.

        Raises ValueError, with the file, for rows without a trained token, and when the own rows do not fill a global batch.
        """
        num_rows = [len(rows) for rows in self.sources]
        if not self.replayed:
            return Schedule(num_rows, [1.0], global_batch_size, seed)
        for rows in self.sources:
            if not rows.manifest["labels"]:
                raise ValueError(
                    f"{rows.path}: no token of it is trained in the collation {rows.manifest['collation']}, so it has no share "
                    "of them; leave its stage out of recipe.data.replay, or choose another recipe.data.collation"
                )
        in_order = [1 - sum(shares.values()), *(shares[name] for name in self.replayed)]
        wanted = chances(num_rows, [rows.manifest["labels"] for rows in self.sources], in_order)
        return Schedule(num_rows, wanted, global_batch_size, seed)


def open_replayed(paths: Mapping[str, Path], own: PackedRows) -> dict[str, PackedRows]:
    """Open the replayed rows, by the names of their stages. Raises ValueError for rows made otherwise than the own."""
    found = {name: PackedRows(path) for name, path in paths.items()}
    for name, rows in found.items():
        for key in ("tokenizer", "sequence_length", "collation", "overlong"):
            if rows.manifest[key] != own.manifest[key]:
                raise ValueError(
                    f"{paths[name]}: {key}: made with {rows.manifest[key]}, the stage's own rows with {own.manifest[key]}; "
                    "tokenize and pack what is replayed like these"
                )
    return found
