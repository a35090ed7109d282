"""Reads stored rows back, into buffers of its caller, each row checked as it is read.

Shapes: B rows, S tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.states.stored.chunk import LEFT_OUT, Layout, Line, read_row
from longspec.states.stored.declaration import Declaration
from longspec.states.stored.encoding import DTYPES
from longspec.states.stored.manifest import read_shards

OPEN_LINES = 256  # chunks whose lines stay in memory


class StoredRows:
    """The rows of a manifest.json, or of one shard.json. Raises ValueError for manifests that are missing or damaged."""

    def __init__(self, manifest: Path) -> None:
        self.manifest, self.shards = manifest, read_shards(manifest)
        self.declaration: Declaration = self.shards[0].declaration
        self.left_out = {int(row): str(why) for shard in self.shards for row, why in shard.content["left_out"].items()}
        self.bytes_read = 0
        self._lines = lru_cache(maxsize=OPEN_LINES)(self._lines_of)

    def _lines_of(self, shard: int, chunk: int) -> tuple[Path, Layout, dict[int, Line]]:
        of = self.shards[shard]
        described = of.content["chunks"][chunk]
        return of.file(described), of.layout(described), of.lines(described)

    def _find(self, row: int) -> tuple[int, int]:
        """The shard that holds a row, and the place of its chunk there."""
        for number, shard in enumerate(self.shards):
            if row in shard.rows:
                per_chunk = shard.content["chunks"][0]["rows"]
                return number, (row - shard.rows.start) // per_chunk
        raise ValueError(f"{self.manifest}: row {row}: there are {self.declaration.num_rows}; build the states of these rows")

    def read(self, rows: Sequence[int], *, pinned: bool) -> dict[str, Tensor]:
        """The stored tensors of some rows, [B, S, ...] on the host; zeros for rows that were left out.

        Raises ValueError, with file, row and what mends it, for bytes that are not those that were written.
        """
        tensors, length = self.declaration.tensors, self.declaration.sequence_length
        found = {
            tensor.name: torch.empty(len(rows), length, *tensor.token_shape, dtype=DTYPES[tensor.dtype], pin_memory=pinned)
            for tensor in tensors
        }
        for place, row in enumerate(rows):
            parts = [part[place].reshape(-1).view(torch.uint8) for part in found.values()]
            if row in self.left_out:
                for part in parts:
                    part.zero_()
            else:
                self._read_row(row, [memoryview(part.numpy().data) for part in parts])
        return found

    def _read_row(self, row: int, buffers: list[memoryview]) -> None:
        number, chunk = self._find(row)
        advice = self.shards[number].advice
        path, layout, lines = self._lines(number, chunk)
        line: Any = lines.get(row)
        if line is None or LEFT_OUT in line:
            raise ValueError(f"{path}: row {row}: has no states; {advice}")
        if not path.is_file():
            raise ValueError(f"{path}: is missing; {advice}")
        with path.open("rb", buffering=0) as file:
            wrong = read_row(file.fileno(), layout, line, buffers)
        if wrong is not None:
            raise ValueError(f"{path}: row {row}: {wrong}: torn, or its checksum differs; {advice}")
        self.bytes_read += sum(len(buffer) for buffer in buffers)


class JointRows:
    """Stored rows numbered through, source after source, with the face of StoredRows.

    What is stored of a row is the same in every source, as its declaration says: only the rows differ.
    """

    def __init__(self, sources: Sequence[StoredRows]) -> None:
        self.sources, self.declaration = sources, sources[0].declaration
        assert all(source.declaration.tensors == self.declaration.tensors for source in sources)
        self._edges = np.cumsum([0, *(source.declaration.num_rows for source in sources)]).tolist()
        self.left_out = {
            first + row: why
            for first, source in zip(self._edges[:-1], sources, strict=True)
            for row, why in source.left_out.items()
        }

    def read(self, rows: Sequence[int], *, pinned: bool) -> dict[str, Tensor]:
        """The stored tensors of some rows, [B, S, ...] on the host; see StoredRows.read."""
        found = [self._read_row(row) for row in rows]
        joined = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        return {name: tensor.pin_memory() for name, tensor in joined.items()} if pinned else joined

    def _read_row(self, row: int) -> dict[str, Tensor]:
        source = bisect_right(self._edges, row) - 1
        return self.sources[source].read([row - self._edges[source]], pinned=False)
