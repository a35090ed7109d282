"""Which chains of a text have a label in which step.

In step i the chain that starts at slot t predicts token t + 2 + i, by the target's distribution after token t + 1 + i.
Shapes: B rows, S tokens, N tokens whose next one is trained, M of them that a step's chains reach.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.models.attention.visibility import document_starts
from longspec.models.inputs import NO_LABEL


@dataclass(frozen=True)
class ChainLabels:
    """tokens_N: of the B * S tokens those whose next one is trained and in their document; labels_N: that next one.

    For each step, int64 [M]: slots, the chains, of B * (S - 2 - step), that predict one of these; places: which of the N.
    """

    tokens_N: Tensor
    labels_N: Tensor
    slots: list[Tensor]
    places: list[Tensor]

    @classmethod
    def of(cls, labels_BS: Tensor, document_ids_BS: Tensor | None, steps: int) -> "ChainLabels":
        """Those of rows with at least steps + 2 tokens."""
        next_BS, starts_BS = labels_BS[:, 1:], None
        if document_ids_BS is not None:
            starts_BS = document_starts(document_ids_BS)
            next_BS = next_BS.masked_fill(starts_BS[:, 1:] != starts_BS[:, :-1], NO_LABEL)
        trained_BS = next_BS != NO_LABEL
        places_BS = trained_BS.flatten().cumsum(0).view_as(trained_BS) - 1
        slots, places = [], []
        for step in range(steps):
            reached = trained_BS[:, 1 + step :]
            if starts_BS is not None:
                reached = reached & (starts_BS[:, 1 + step : -1] == starts_BS[:, : -2 - step])
            slots.append(reached.flatten().nonzero()[:, 0])
            places.append(places_BS[:, 1 + step :][reached])
        last = torch.zeros_like(trained_BS[:, :1])
        tokens_N = torch.cat([trained_BS, last], dim=1).flatten().nonzero()[:, 0]
        return cls(tokens_N, next_BS[trained_BS], slots, places)
