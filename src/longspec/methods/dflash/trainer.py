"""Train DFlash: each step draws new anchors, and one forward fills the blocks at all of them, next to a frozen target.

Shapes: B rows, S tokens, A blocks of a row, W slots of a block, K = W - 1 predicted ones, Q = A W, R slots that have a label, N
tokens whose next one is trained, H hidden width, N query heads, K key/value heads, D head width.
"""

from dataclasses import dataclass
from functools import partial
from math import exp

import torch
from torch import Tensor

from longspec.config.schema import HARD
from longspec.methods.dflash.layer import DFlashLayer
from longspec.methods.dflash.settings import DECAY, Settings, anchors_of, mask_token_of
from longspec.methods.own_layers import OwnLayersTrainer
from longspec.models.attention import backends
from longspec.models.attention.blocks import BlockVisibility
from longspec.models.attention.chains import KeysValues
from longspec.models.attention.visibility import document_starts
from longspec.models.block_losses import SlotLabels, block_cross_entropy
from longspec.models.losses import NO_LABEL, StepSums
from longspec.models.target import whole
from longspec.models.teachers import draft_numbers
from longspec.states.forward import TargetStates
from longspec.states.tensors import EMBEDDED

SHAPES = 8  # different numbers of blocks that a row can have in a step: kernels are compiled for each


@dataclass(frozen=True)
class Blocks:
    """Hold where a step's blocks begin, and what their slots learn.

    An anchor is a token whose next token is trained and in its document. Rows with fewer anchors than others are padded with
    blocks without labels, at token 0. scale_BA: a row's possible anchors divided by its chosen ones, so that the mean of a
    step's loss over all draws is the loss over all anchors.

    trained_BS: tokens whose next one is trained; labels_BAK: the token at slot k's place, NO_LABEL past the document's end.
    """

    anchors_BA: Tensor
    starts_BA: Tensor
    scale_BA: Tensor
    labels_BAK: Tensor
    trained_BS: Tensor

    @classmethod
    def of(cls, labels_BS: Tensor, document_ids_BS: Tensor | None, priority_BS: Tensor | None, settings: Settings) -> "Blocks":
        """Choose the anchors with the highest priority; None: spread them evenly over the possible ones."""
        documents_BS = torch.zeros_like(labels_BS) if document_ids_BS is None else document_ids_BS
        starts_BS, trained_BS = document_starts(documents_BS), torch.zeros_like(labels_BS, dtype=torch.bool)
        trained_BS[:, :-1] = (labels_BS[:, 1:] != NO_LABEL) & (starts_BS[:, 1:] == starts_BS[:, :-1])
        possible_B1, most = trained_BS.sum(1, keepdim=True), anchors_of(settings, labels_BS.shape[1])
        step = -(-most // SHAPES)
        count = min(most, max(1, -(-int(possible_B1.max()) // step)) * step)
        if priority_BS is None:
            rank_BS = trained_BS.cumsum(1) - 1
            group_BS, before_BS = (x_BS * count // possible_B1.clamp_min(1) for x_BS in (rank_BS, rank_BS - 1))
            chosen_BS = trained_BS & (group_BS != before_BS)
        else:
            best_BA = priority_BS.masked_fill(~trained_BS, -1.0).topk(count, dim=1).indices
            chosen_BS = torch.zeros_like(trained_BS).scatter(1, best_BA, value=True) & trained_BS
        order_BA = chosen_BS.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
        has_label_BA = chosen_BS.gather(1, order_BA)
        anchors_BA = order_BA * has_label_BA
        scale_B1 = possible_B1 / chosen_BS.sum(1, keepdim=True).clamp_min(1)
        starts_BA = starts_BS.gather(1, anchors_BA)
        place_BAK = anchors_BA[:, :, None] + torch.arange(1, settings.block_size, device=labels_BS.device)
        inside_BAK = (place_BAK < labels_BS.shape[1]) & has_label_BA[:, :, None]
        place_BX = place_BAK.flatten(1).clamp_max(labels_BS.shape[1] - 1)
        inside_BAK &= starts_BS.gather(1, place_BX).view_as(place_BAK) == starts_BA[:, :, None]
        labels_BAK = labels_BS.gather(1, place_BX).view_as(place_BAK).where(inside_BAK, NO_LABEL)
        return cls(anchors_BA, starts_BA, scale_B1.expand_as(anchors_BA), labels_BAK, trained_BS)

    def slot_labels(self, ids_V: Tensor | None) -> SlotLabels:
        """Return the labels slot by slot. ids_V: the draft vocabulary, None: all tokens."""
        rows_R, blocks_R, slots_R = (self.labels_BAK != NO_LABEL).nonzero(as_tuple=True)
        places_BS = self.trained_BS.flatten().cumsum(0).view_as(self.trained_BS) - 1
        before_R = self.anchors_BA[rows_R, blocks_R] + slots_R
        numbers_R = draft_numbers(self.labels_BAK[rows_R, blocks_R, slots_R], ids_V)
        of_all_R = rows_R * self.anchors_BA.shape[1] + blocks_R
        scale_A, slots = self.scale_BA.flatten(), self.labels_BAK.shape[2]
        return SlotLabels(places_BS[rows_R, before_R], numbers_R, of_all_R, slots_R, scale_A, slots)


class DFlashTrainer(OwnLayersTrainer):
    """Train a draft next to a frozen target."""

    draft_model: DFlashLayer
    mask_H: Tensor

    def __init__(self, states: TargetStates, draft_model: DFlashLayer, settings: Settings) -> None:
        super().__init__(states, draft_model, settings)
        config = states.config
        embeddings = states.target.model.embed_tokens.weight
        with states.gather([embeddings]), torch.no_grad():
            mask_H = whole(embeddings)[mask_token_of(settings.mask_token, config.vocab_size)].clone()
        self.register_buffer("mask_H", mask_H, persistent=False)
        weights = [exp(-slot / settings.gamma) for slot in range(settings.predicted)]
        by_slot = tuple(weight / sum(weights) for weight in weights)
        self.weights: tuple[float, ...] | float = by_slot if settings.weights == DECAY else settings.alpha

    def measure(
        self,
        found: dict[str, Tensor],
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        document_ids: Tensor | None,
        with_llm_loss: bool,
        priority: Tensor | None = None,
    ) -> tuple[StepSums, Tensor, Tensor | None, dict[str, Tensor]]:
        """Compute the losses of a step's blocks.

        priority [B, S]: the possible anchors with the highest are chosen; None: they are spread evenly. Hard labels are the
        text's tokens; with soft ones a slot's token to learn is the target's likeliest. counts, over all blocks: `blocks` with
        a label; `leading_hits`: drafted tokens equal to the text's, up to each block's first other one.
        """
        layer, settings, head_weight = self.draft_model, self.settings, self.states.head_weight
        blocks = Blocks.of(labels, document_ids, priority, settings)
        hidden_BQH = self._filled(found, position_ids, blocks)
        slot_labels = blocks.slot_labels(layer.ids_V)
        slots_AWH = hidden_BQH.unflatten(1, (-1, settings.block_size)).flatten(0, 1)
        hidden_RH = layer.norm(slots_AWH[slot_labels.blocks_R, slot_labels.slots_R + 1])
        tokens_N = blocks.trained_BS.flatten().nonzero()[:, 0]
        next_N = input_ids.roll(-1, 1).flatten()[tokens_N]
        with self.states.gather([head_weight]):
            wanted = settings.loss != HARD or with_llm_loss
            teacher = self.teacher(found, tokens_N, next_N, layer.ids_V, with_llm_loss) if wanted else None
            take = partial(block_cross_entropy, teacher=teacher, labels=slot_labels, weights=self.weights, kind=settings.loss)
            sums: StepSums = take(head_weight, hidden_RH) if layer.lm_head is None else layer.lm_head(hidden_RH, take)
        assert sums.leading_hits is not None, "of blocks both are counted"
        assert sums.target_K is not None
        counts = {"blocks": (blocks.labels_BAK[:, :, 0] != NO_LABEL).sum(), "leading_hits": sums.leading_hits}
        llm_loss = sums.target_K.sum() / sums.reached_K.sum().clamp_min(1) if with_llm_loss else None
        return sums, blocks.trained_BS.sum(), llm_loss, counts

    def _filled(self, found: dict[str, Tensor], position_ids_BS: Tensor, blocks: Blocks) -> Tensor:
        """Return the hidden states [B, Q, H] of all blocks' slots, before the last norm."""
        layer, settings, embedded_BSH = self.draft_model, self.settings, found[EMBEDDED]
        anchors_BA, width = blocks.anchors_BA, embedded_BSH.shape[-1]
        newest_BAH = embedded_BSH.gather(1, anchors_BA[:, :, None].expand(-1, -1, width))
        masks = self.mask_H.expand(*newest_BAH.shape[:2], settings.predicted, width)
        x_BQH = torch.cat([newest_BAH[:, :, None], masks], dim=2).flatten(1, 2)
        place_BA = position_ids_BS.gather(1, anchors_BA)
        place_BQ = (place_BA[:, :, None] + torch.arange(settings.block_size, device=place_BA.device)).flatten(1)
        turns = self.rope_of_text(found, embedded_BSH, position_ids_BS)
        rope = layer.rope(self.states.target, embedded_BSH, place_BQ)
        text = layer.context_keys_values(layer.context(self.taps(found)), turns)
        window = None if settings.sliding_window is None else settings.sliding_window - 1
        visibility = BlockVisibility(anchors_BA, blocks.starts_BA, settings.block_size, window=window)

        def attend(number: int, q_BNQD: Tensor, own: KeysValues) -> Tensor:
            scale = q_BNQD.shape[-1] ** -0.5
            return backends.attend(q_BNQD, *text[number], visibility, scale, self.states.attention, own=[own])

        return layer(x_BQH, rope, attend)
