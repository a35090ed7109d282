"""Which chains of a text have a label in which step.

A chain begins at every token t whose next one is in its document; in step i it predicts token t + 2 + i, by the target's
distribution after token t + 1 + i. Rows without document ids are one document each.

Shapes: B rows, S tokens, N tokens whose next one is trained, M of them that a step's chains reach.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.models.attention.visibility import PADDING, document_starts
from longspec.models.inputs import NO_LABEL


@dataclass(frozen=True)
class ChainLabels:
    """tokens_N: of the B * S tokens those whose next one is trained and in their document; labels_N: that next one.

    For each step, int64 [M]: chains, of the B * (S - 2 - step) that can have a label, those that predict one of these; places:
    which of the N. past_document: how many predictions, over all chains and steps, would be of a token past the end of the
    document in which the chain begins.
    """

    tokens_N: Tensor
    labels_N: Tensor
    chains: list[Tensor]
    places: list[Tensor]
    past_document: Tensor

    @classmethod
    def of(cls, labels_BS: Tensor, document_ids_BS: Tensor | None, steps: int) -> "ChainLabels":
        """Those of rows with at least steps + 2 tokens."""
        next_BS, starts_BS = labels_BS[:, 1:], None
        if document_ids_BS is not None:
            starts_BS = document_starts(document_ids_BS)
            next_BS = next_BS.masked_fill(starts_BS[:, 1:] != starts_BS[:, :-1], NO_LABEL)
        trained_BS = next_BS != NO_LABEL
        places_BS = trained_BS.flatten().cumsum(0).view_as(trained_BS) - 1
        chains, places = [], []
        for step in range(steps):
            reached = trained_BS[:, 1 + step :]
            if starts_BS is not None:
                reached = reached & (starts_BS[:, 1 + step : -1] == starts_BS[:, : -2 - step])
            chains.append(reached.flatten().nonzero()[:, 0])
            places.append(places_BS[:, 1 + step :][reached])
        last = torch.zeros_like(trained_BS[:, :1])
        tokens_N = torch.cat([trained_BS, last], dim=1).flatten().nonzero()[:, 0]
        return cls(tokens_N, next_BS[trained_BS], chains, places, _count_past_document(labels_BS, document_ids_BS, steps))


def _count_past_document(labels_BS: Tensor, document_ids_BS: Tensor | None, steps: int) -> Tensor:
    """Predictions past a document's end: in step i of a document of n tokens, min(n - 1, i + 1) of its n - 1 chains."""
    if document_ids_BS is None:
        document_ids_BS = torch.zeros_like(labels_BS)
    is_text_BS, starts_BS = document_ids_BS != PADDING, document_starts(document_ids_BS)

    def within(distance: int) -> Tensor:
        """Tokens with another one so far behind them in their document."""
        return ((starts_BS[:, distance:] == starts_BS[:, :-distance]) & is_text_BS[:, distance:]).sum()

    return steps * within(1) - torch.stack([within(2 + step) for step in range(steps)]).sum()
