"""Train EAGLE-3 (arXiv 2503.01840, section 3.2): chains are unrolled from every token of a text, next to a frozen target.

Shapes: B rows, S tokens, C chains of a step, N tokens whose next one is trained, M of them that a step's chains reach, H hidden
width, N query heads, K key/value heads, D head width.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspec.methods.eagle3.layer import Eagle3Layer
from longspec.methods.own_layers import OwnLayersTrainer
from longspec.models.attention import backends
from longspec.models.attention.chains import KeysValues
from longspec.models.attention.visibility import Visibility, document_starts
from longspec.models.chain_losses import chain_cross_entropy
from longspec.models.losses import NO_LABEL, StepSums
from longspec.states.tensors import EMBEDDED


@dataclass(frozen=True)
class ChainLabels:
    """Hold which chains of a text have a label in each step.

    A chain begins at every token t whose next token is in its document; in step i it predicts token t + 2 + i, from the
    target's distribution after token t + 1 + i. Rows without document ids are one document each.

    tokens_N: those of the B * S tokens whose next token is trained and in their document; labels_N: that next token.

    For each step, int64 [M]: chains: those of the B * (S - 2 - step) possible chains that predict such a token; places: its
    number among the N.
    """

    tokens_N: Tensor
    labels_N: Tensor
    chains: list[Tensor]
    places: list[Tensor]

    @classmethod
    def of(cls, labels_BS: Tensor, document_ids_BS: Tensor | None, steps: int) -> "ChainLabels":
        """Build the labels; each row needs at least steps + 2 tokens."""
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
        return cls(tokens_N, next_BS[trained_BS], chains, places)


def _chosen(x_BCH: Tensor, chains_M: Tensor) -> Tensor:
    """Return the rows of these chains, [M, H]; no copy if they are all."""
    x_RH = x_BCH.flatten(0, 1)
    return x_RH if len(chains_M) == len(x_RH) else x_RH[chains_M]


class Eagle3Trainer(OwnLayersTrainer):
    """Train a draft next to a frozen target."""

    draft_model: Eagle3Layer

    def measure(
        self,
        found: dict[str, Tensor],
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        document_ids: Tensor | None,
        with_llm_loss: bool,
    ) -> tuple[StepSums, int, Tensor | None, dict[str, Tensor]]:
        """Compute the losses of all chains, step i weighted by decay^i; the target's loss covers all trained tokens."""
        settings, head_weight = self.settings, self.states.head_weight
        chain_labels = ChainLabels.of(labels, document_ids, settings.steps)
        rows = self._unrolled(found, position_ids, document_ids, chain_labels)
        weights = [settings.decay**step for step in range(settings.steps)]
        ids_V = None if settings.vocabulary is None else self.draft_model.ids_V
        with self.states.gather([head_weight]):
            teacher = self.teacher(found, chain_labels.tokens_N, chain_labels.labels_N, ids_V, with_llm_loss)
            assert teacher is not None, "reads has the final hidden states"
            take = partial(
                chain_cross_entropy, teacher=teacher, places=chain_labels.places, weights=weights, kind=settings.loss
            )
            sums: StepSums = self.draft_model.lm_head(rows, take)
        count = len(chain_labels.labels_N)
        return sums, count, None if sums.target is None else sums.target / max(1, count), {}

    def _unrolled(
        self, found: dict[str, Tensor], position_ids_BS: Tensor, document_ids_BS: Tensor | None, chain_labels: ChainLabels
    ) -> list[Tensor]:
        """Return, for each step, the normed hidden states [M, H] of the chains that have a label."""
        layer, length, rows = self.draft_model, found[EMBEDDED].shape[1], []
        keys: list[KeysValues] = []  # of the steps so far; the first step's are the text's

        def attend(q_BNCD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor) -> Tensor:
            step, chains = len(keys), q_BNCD.shape[2]  # fewer chains in each step
            keys.append((k_BKCD, v_BKCD))
            text, *own = [(k[:, :, :chains], v[:, :, :chains]) for k, v in keys]
            # Query t of step i has the position of the text's token t plus i.
            window = None if self.settings.sliding_window is None else self.settings.sliding_window - 1 - step
            documents = None if document_ids_BS is None else document_ids_BS[:, :chains]
            visibility = Visibility(window=window, document_ids_BT=documents)
            return backends.attend(q_BNCD, *text, visibility, q_BNCD.shape[-1] ** -0.5, self.states.attention, own=own)

        turns = self.rope_of_text(found, found[EMBEDDED], position_ids_BS)
        feature_BCH = layer.feature([tap_BSH[:, : length - 2] for tap_BSH in self.taps(found)])
        for step, chains_M in enumerate(chain_labels.chains):
            count = length - 2 - step  # chains that can have a label: nothing is computed after the row's end
            embedded_BCH = found[EMBEDDED][:, 1 + step : length - 1]
            rope = (turns[0][:, step : step + count], turns[1][:, step : step + count])
            hidden_BCH = layer.midlayer(embedded_BCH, feature_BCH[:, :count], rope, attend)
            feature_BCH = layer.fed_back(hidden_BCH)
            rows.append(_chosen(feature_BCH, chains_M) if layer.norm_output else layer.norm(_chosen(hidden_BCH, chains_M)))
        return rows
