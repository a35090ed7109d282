"""The rows that a stage trains on: its own, and those of earlier stages that it replays (recipe.data.replay)."""

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longspec.data.pack.arrow_shards import PackedRows, Row, count_labels
from longspec.data.schedule import Schedule, chances


class TrainedRows:
    """A stage's own packed rows and replayed ones as one, numbered through: the own first, then by the stages' names.

    replayed: by the names of the earlier stages. Raises ValueError for rows of another tokenizer than the own.
    """

    def __init__(self, own: PackedRows, replayed: Mapping[str, PackedRows] | None = None) -> None:
        self.own, self.replayed = own, dict(sorted((replayed or {}).items()))
        self.sequence_length = own.sequence_length
        self.sources = [own, *self.replayed.values()]
        for rows in self.sources:
            if rows.manifest["tokenizer"] != own.manifest["tokenizer"]:
                raise ValueError(f"{rows.path}: another tokenizer made these rows than {own.path}; tokenize and pack again")
        self._edges = np.cumsum([0, *map(len, self.sources)]).tolist()

    def __len__(self) -> int:
        return int(self._edges[-1])

    def source_of(self, row: int) -> tuple[int, int]:
        """The place of a row's source, 0 for the own, and the row's number there."""
        source = bisect_right(self._edges, int(row)) - 1
        if not 0 <= source < len(self.sources):
            raise IndexError(f"{self.own.path}: row {row} of {len(self)}")
        return source, int(row) - self._edges[source]

    def find(self, row: int) -> tuple[pa.RecordBatch, int]:
        """The record batch that holds a row, and the row's place in it."""
        source, number = self.source_of(row)
        return self.sources[source].find(number)

    def __getitem__(self, row: int) -> Row:
        source, number = self.source_of(row)
        return self.sources[source][number]

    def labels_by_name(self, rows: NDArray[np.int64]) -> dict[str, int]:
        """Trained tokens in some of the replayed rows, by the stage that they are of."""
        found = dict.fromkeys(self.replayed, 0)
        names = list(self.replayed)
        for row in rows:
            source, _ = self.source_of(row)
            if source:
                found[names[source - 1]] += count_labels(self.find, [row])
        return found

    def schedule(self, shares: Mapping[str, float], global_batch_size: int, seed: int) -> Schedule:
        """The rows of each step. shares: of the trained tokens, by the names of the replayed stages.

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
    """The replayed rows by the names of their stages. Raises ValueError for rows that are packed otherwise than the own."""
    found = {name: PackedRows(path) for name, path in paths.items()}
    for name, rows in found.items():
        for key in ("sequence_length", "collation", "overlong"):
            if rows.manifest[key] != own.manifest[key]:
                raise ValueError(
                    f"{paths[name]}: {key}: packed with {rows.manifest[key]}, the stage's own rows with {own.manifest[key]}; "
                    "pack what is replayed like these"
                )
    return found
