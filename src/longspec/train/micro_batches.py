"""One rank's share of each optimizer step's global batch, as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspec.config import Recipe
from longspec.data.batches import global_batch
from longspec.data.pack.arrow_shards import PackedRows
from longspec.distributed import Ranks
from longspec.methods.glide.draws import draw_row, shift_positions
from longspec.methods.glide.model import BLOCKS


@dataclass
class MicroBatch:
    """Arguments of one forward: int64 tensors [B, S]; lag int64 [B] or "blocks"."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    lag: Tensor | str
    document_ids: Tensor | None


class StepBatches:
    """Micro batches of this rank for any step, without a replay of the steps before."""

    def __init__(self, rows: PackedRows, recipe: Recipe, micro_batch: int, ranks: Ranks, target_positions: int) -> None:
        self.rows, self.recipe, self.micro_batch, self.ranks = rows, recipe, micro_batch, ranks
        self.target_positions = target_positions

    def row_numbers(self, step: int) -> np.ndarray:
        """Row numbers of the whole global batch of 0-based `step`."""
        return global_batch(len(self.rows), self.recipe.global_batch, self.recipe.seed, step)

    def num_labels(self, step: int) -> int:
        """Trained tokens of the whole global batch."""
        return int(self.rows.num_labels_R[self.row_numbers(step)].sum())

    def micro_batches(self, step: int) -> list[np.ndarray]:
        """Row numbers of each of this rank's micro batches."""
        share = self.row_numbers(step)[self.ranks.replica :: self.ranks.replicas]
        return [share[start : start + self.micro_batch] for start in range(0, len(share), self.micro_batch)]

    def load(self, step: int, row_numbers: np.ndarray, device: torch.device) -> MicroBatch:
        """Read rows and make their random draws, which depend on (seed, step, row) alone."""
        draft = self.recipe.draft
        ids, labels, positions, documents, lags = [], [], [], [], []
        for number in row_numbers:
            row = self.rows[int(number)]
            length = self.rows.sequence_length
            draw = draw_row(draft, self.recipe.seed, step, int(number), length, self.target_positions)
            ids.append(row.input_ids_S)
            labels.append(np.where(row.loss_mask_S > 0, row.input_ids_S, -100))
            positions.append(shift_positions(row.position_ids_S, draw))
            documents.append(row.document_ids_S)
            lags.append(draw.lag)

        def tensor(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.stack(arrays).astype(np.int64)).to(device)

        # Trailing padding needs no mask: causality hides it from every token before it.
        packed = any(array.max() > 0 for array in documents)
        return MicroBatch(
            input_ids=tensor(ids),
            labels=tensor(labels),
            position_ids=tensor(positions),
            lag=BLOCKS if draft.lag_mode == "blocks" else torch.tensor(lags, device=device),
            document_ids=tensor(documents) if packed else None,
        )
