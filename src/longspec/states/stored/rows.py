"""The rows whose states are stored: packed rows, or held-out ones.

Shapes: B rows, S tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import HeldOutRow


@dataclass(frozen=True)
class RowBatch:
    """What the target is asked with, int64 [B, S] each; document_ids_BS None: each row is one text.

    is_text_BS: false at the padding, whose states are of no use, and may hang on the rows beside it.
    """

    input_ids_BS: Tensor
    position_ids_BS: Tensor
    document_ids_BS: Tensor | None
    is_text_BS: Tensor


def _stacked(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays).astype(np.int64))


class TrainingRows:
    """The rows that a stage trains on, by their numbers from 0. hash: of all that the rows are."""

    held_out = False

    def __init__(self, packed: PackedRows) -> None:
        self.packed, self.hash, self.sequence_length = packed, packed.data_hash, packed.sequence_length
        self.tokenizer = packed.manifest["tokenizer"]

    def __len__(self) -> int:
        return len(self.packed)

    def batch(self, numbers: Sequence[int]) -> RowBatch:
        """Some rows with plain positions, as training hands them to the target."""
        rows = [self.packed[number] for number in numbers]
        documents_BS = _stacked([row.document_ids_S for row in rows])
        several = bool((documents_BS > 0).any())
        input_ids_BS, position_ids_BS = (
            _stacked([getattr(row, name) for row in rows]) for name in ("input_ids_S", "position_ids_S")
        )
        return RowBatch(input_ids_BS, position_ids_BS, documents_BS if several else None, documents_BS >= 0)


class HeldOutSource:
    """The held-out rows that acceptance is estimated on while a stage trains; a face like that of TrainingRows."""

    held_out = True

    def __init__(self, packed: PackedRows, rows: Sequence[HeldOutRow]) -> None:
        self.rows, self.sequence_length, self.tokenizer = rows, packed.sequence_length, packed.manifest["tokenizer"]
        tokens = b"".join(row.input_ids_S.astype(np.int64).tobytes() for row in rows)
        self.hash = hashlib.sha256(tokens).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int]) -> RowBatch:
        """Some rows, as the estimate hands them to the target."""
        input_ids_BS = _stacked([self.rows[number].input_ids_S for number in numbers])
        positions_BS = torch.arange(self.sequence_length).expand_as(input_ids_BS)
        return RowBatch(input_ids_BS, positions_BS, None, torch.ones_like(input_ids_BS).bool())


RowSource = TrainingRows | HeldOutSource
