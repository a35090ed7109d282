"""Stored states of a stage's own rows and of those that it replays, read as one.

Shapes: B rows, S tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspec.states.stored.reader import StoredRows


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
