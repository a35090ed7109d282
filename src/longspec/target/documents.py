"""Packed rows as batches for a causal language model.

Suffixes: B rows, S tokens.
"""

from typing import NamedTuple

import numpy as np
import torch

from longspec.data.pack.arrow_shards import Row
from longspec.models.attention.visibility import Visibility
from longspec.models.inputs import NO_LABEL


class Batch(NamedTuple):
    """Rows ready for the model; labels stand at the place that predicts them."""

    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    position_ids_BS: torch.Tensor
    visibility: Visibility  # which tokens a token attends to


def collate(rows: list[Row]) -> Batch:
    """Rows of one length as a batch; a document's first token and padding are nobody's label."""
    input_ids_BS = torch.from_numpy(np.stack([row.input_ids_S for row in rows])).long()
    loss_mask_BS = torch.from_numpy(np.stack([row.loss_mask_S for row in rows])).bool()
    position_ids_BS = torch.from_numpy(np.stack([row.position_ids_S for row in rows])).long()
    labels_BS = torch.full_like(input_ids_BS, NO_LABEL)
    labels_BS[:, :-1] = input_ids_BS[:, 1:].masked_fill(~loss_mask_BS[:, 1:], NO_LABEL)
    document_ids_BS = torch.from_numpy(np.stack([row.document_ids_S for row in rows])).long()
    # One document to each row, without padding, needs no ids: the rows then share their calls.
    alike = bool((document_ids_BS == document_ids_BS[:, :1]).all())
    visibility = Visibility(document_ids_BT=None if alike else document_ids_BS)
    return Batch(input_ids_BS, labels_BS, position_ids_BS, visibility)
