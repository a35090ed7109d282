"""The rows that a stage trains on, and when: rows of its own data sets (recipe.data.name), and of those that it replays.

Which rows an optimizer step trains is a function of (seed, step) alone, whatever ranks and micro batches share it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longspec.data.pack.arrow_shards import PackedRows, Row, count_labels


class Schedule:
    """Choose the rows of each global batch. The first `own` sources are the stage's own, the others are replayed.

    num_rows: of each source; row numbers run through all of them. chances: for each source, that a row of a batch is from it;
    their sum is 1. At every step each source has had its chance's part of all rows, to a row or a few. Its rows are taken
    without replacement until all are used, then again in another order. An epoch has as many own rows as there are, less what
    does not fill a global batch: a single own source leaves these out; of several, one repeats rows and another leaves out as
    many. Raises ValueError if the own rows do not fill a global batch.
    """

    def __init__(self, num_rows: list[int], chances: list[float], global_batch_size: int, seed: int, own: int = 1) -> None:
        rows = sum(num_rows[:own])
        if rows < global_batch_size:
            raise ValueError(
                f"recipe.global_batch: {global_batch_size} rows in a step do not fit {rows} packed rows; "
                "lower global_batch or data.sequence_length, or bring more data"
            )
        self.own, self.own_rows = own, rows // global_batch_size * global_batch_size  # in an epoch
        self.num_rows, self.rows_an_epoch = num_rows, [self.own_rows, *num_rows[1:]] if own == 1 else num_rows
        self.global_batch_size, self.seed = global_batch_size, seed
        self.first_rows = [sum(num_rows[:source]) for source in range(len(num_rows))]
        self.own_share = sum(chances[:own]) / sum(chances)
        self._shares_of_rest = [chance / sum(chances[source:]) for source, chance in enumerate(chances)]
        # A step looks at the present epoch of every source, and sometimes at the next one.
        self._order = lru_cache(maxsize=2 * len(num_rows))(self._shuffled)

    def taken(self, rows: int) -> list[int]:
        """Return how many of the stage's first `rows` rows are from each source; with more rows no count falls."""
        counts = []
        # Sources are split off one after the other, since rounding all at once could take a row back.
        for share in self._shares_of_rest[:-1]:
            counts.append(int(rows * share + 0.5))
            rows -= counts[-1]
        return [*counts, rows]

    def steps(self, epochs: int) -> int:
        """Return the optimizer steps that train as many own rows as `epochs` have, in whole batches."""
        wanted = self.own_rows * epochs
        # A count strays from its chance by at most half a row for each source that was split off before.
        step = ceil((wanted + self.own) / (self.own_share * self.global_batch_size))
        while sum(self.taken(step * self.global_batch_size)[: self.own]) > wanted:
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
        # Sort raw generator words: numpy promises that these stay the same between versions, but not `permutation`'s result.
        return np.argsort(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(self.num_rows[source]), kind="stable")


def chances(num_rows: list[int], labels: list[int], shares: list[float]) -> list[float]:
    """Return the chance of a row of each source that gives each source its share of the trained tokens.

    labels: trained tokens of all rows of each source, at least one.
    """
    weights = [share * rows / trained for rows, trained, share in zip(num_rows, labels, shares, strict=True)]
    return [weight / sum(weights) for weight in weights]


class TrainedRows:
    """Number all rows of a stage through: its own data sets in order, then the replayed ones sorted by name."""

    def __init__(self, *own: PackedRows, replayed: Mapping[str, PackedRows] | None = None) -> None:
        self.own, self.replayed = own, dict(sorted((replayed or {}).items()))
        self.sources = [*own, *self.replayed.values()]
        self.sequence_length = self.sources[0].sequence_length
        self._edges = np.cumsum([0, *map(len, self.sources)]).tolist()

    def __len__(self) -> int:
        return int(self._edges[-1])

    def source_of(self, row: int) -> tuple[int, int]:
        """Return the number of a row's source, and the row's number there. Raises IndexError for a row that is not there."""
        source = bisect_right(self._edges, int(row)) - 1
        if not 0 <= source < len(self.sources):
            raise IndexError(f"{self.sources[0].path}: row {row} of {len(self)}")
        return source, int(row) - self._edges[source]

    def find(self, row: int) -> tuple[pa.RecordBatch, int]:
        """Return the record batch that holds a row, and the row's place in it."""
        source, number = self.source_of(row)
        return self.sources[source].find(number)

    def __getitem__(self, row: int) -> Row:
        source, number = self.source_of(row)
        return self.sources[source][number]

    def of_own(self, values: Sequence[Any]) -> Any:
        """Return what belongs to the own rows: the value itself for one data set, a mapping by name for several."""
        by_name = {rows.manifest.get("dataset"): value for rows, value in zip(self.own, values, strict=True)}
        return values[0] if len(self.own) == 1 else by_name

    def labels_by_source(self, rows: NDArray[np.int64]) -> dict[str, dict[str, int]]:
        """Return the counts of trained tokens in some rows, as metrics have them: by data set, if there are several."""
        counts = [0] * len(self.sources)
        for row in rows if len(self.sources) > 1 else ():
            counts[self.source_of(row)[0]] += count_labels(self.find, [row])
        own, replayed = counts[: len(self.own)], dict(zip(self.replayed, counts[len(self.own) :], strict=True))
        mixed = {"mixed_labels": self.of_own(own)} if len(own) > 1 else {}
        return mixed | ({"replayed_labels": replayed} if replayed else {})

    def schedule(self, shares: list[float], global_batch_size: int, seed: int) -> Schedule:
        """Return the rows of each step. shares: of the trained tokens, for each source (config.schema.shares_of).

        Raises ValueError, with the file, for rows without a trained token, and if the own rows do not fill a global batch.
        """
        num_rows = [len(rows) for rows in self.sources]
        for rows in self.sources:
            if not rows.manifest["labels"]:
                raise ValueError(
                    f"{rows.path}: no token of it is trained in the collation {rows.manifest['collation']}; leave it out of "
                    "recipe.data.name or recipe.data.replay, or choose another recipe.data.collation or recipe.data.overlong"
                )
        if len(self.sources) == 1:
            return Schedule(num_rows, [1.0], global_batch_size, seed)
        wanted = chances(num_rows, [rows.manifest["labels"] for rows in self.sources], shares)
        return Schedule(num_rows, wanted, global_batch_size, seed, len(self.own))


def open_alike(paths: Iterable[Path], first: PackedRows) -> list[PackedRows]:
    """Open further rows of a stage. Raises ValueError for rows that were made otherwise than `first`."""
    found = []
    for path in paths:
        found.append(rows := PackedRows(path))
        for key in ("tokenizer", "sequence_length", "collation", "overlong"):
            if rows.manifest[key] != first.manifest[key]:
                raise ValueError(
                    f"{path}: {key}: made with {rows.manifest[key]}, {first.path.parent} with {first.manifest[key]}; tokenize "
                    "and pack all rows of a stage alike"
                )
    return found
