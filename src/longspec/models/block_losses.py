"""Compute cross entropy of blocks filled at once, weighted by slot or by how likely earlier slots are kept; in chunks.

D-PACE (arXiv 2605.18810) weighs slot k by the gradient of the expected number of kept tokens with respect to the slot's
log-probability: with q_k the draft's probability of the text's token, s_k = (1 - alpha) q_k + alpha and P_k = s_1 ... s_k, it
is the sum of P_j over j >= k, a constant to the gradient. Slots without a label have s = 1 and add no P.

Shapes: A blocks, K slots of a block that predict, R slots of all blocks that have a label, block after block; C slots and c
blocks of a chunk; N tokens whose next one is trained, H hidden width, T target's vocabulary, V draft vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from longspec.models import losses
from longspec.models.losses import AGREES, HITS, INSIDE, LOSS, OWN, StepSums, chunked, taken_
from longspec.models.teachers import Teacher


@dataclass(frozen=True)
class SlotLabels:
    """Hold what the R slots of `blocks` blocks learn: int64 [R] each, except scale_A.

    tokens_R: the teacher's token (of N) before the label; numbers_R: the draft's number of the text's token, -1 if it cannot
    propose it; blocks_R, ascending, and slots_R: the slot's place; scale_A: a factor of each block's loss.
    """

    tokens_R: Tensor
    numbers_R: Tensor
    blocks_R: Tensor
    slots_R: Tensor
    scale_A: Tensor
    slots: int  # K

    def chunks(self, count: int) -> list[tuple[slice, "SlotLabels"]]:
        """Return spans of about `count` slots, in whole blocks, and their labels; one transfer from the device."""
        blocks, step, found = len(self.scale_A), max(1, count // self.slots), []
        edges = [*range(0, blocks, step), blocks]
        cuts = torch.searchsorted(self.blocks_R, torch.tensor(edges, device=self.blocks_R.device)).tolist()
        for (low, high), (first, last) in zip(pairwise(edges), pairwise(cuts), strict=True):
            if first == last:
                continue
            part = slice(first, last)
            of_slots = (self.tokens_R[part], self.numbers_R[part], self.blocks_R[part] - low, self.slots_R[part])
            found.append((part, SlotLabels(*of_slots, self.scale_A[low:high], self.slots)))
        return found

    def in_blocks(self, values_R: Tensor, elsewhere: float) -> Tensor:
        """Return values of slots at their places in their blocks, [A, K]; `elsewhere` at the other places."""
        found_AK = values_R.new_full((len(self.scale_A), self.slots), elsewhere)
        found_AK[self.blocks_R, self.slots_R] = values_R
        return found_AK


def _weights(logits_CV: Tensor, labels: SlotLabels, weights: tuple[float, ...] | float) -> Tensor:
    """Return the weight [C] of each slot of a chunk, with its block's scale."""
    scale_C = labels.scale_A.to(logits_CV.dtype)[labels.blocks_R]
    if isinstance(weights, tuple):
        return scale_C * logits_CV.new_tensor(weights)[labels.slots_R]
    log_q_C = logits_CV.gather(-1, labels.numbers_R.clamp_min(0)[:, None])[:, 0] - logits_CV.logsumexp(-1)
    q_C = log_q_C.exp() * (labels.numbers_R >= 0)
    likely_cK = labels.in_blocks((1 - weights) * q_C + weights, 1.0)
    kept_cK = likely_cK.cumprod(-1) * labels.in_blocks(torch.ones_like(q_C), 0.0)
    return scale_C * kept_cK.flip(-1).cumsum(-1).flip(-1)[labels.blocks_R, labels.slots_R]


def block_cross_entropy(
    weight_VH: Tensor,
    hidden_RH: Tensor,
    teacher: Teacher | None,
    labels: SlotLabels,
    weights: tuple[float, ...] | float,
    kind: str,
) -> StepSums:
    """Return sums of the losses of logits hidden @ weight_VH.T against the text's tokens, or the target's distribution.

    kind: hard; soft, or tv or lk instead (teachers.py). teacher: of N tokens; None only for hard labels. weights: of slots by
    place, or D-PACE's alpha. A slot whose token to learn (hard: the text's, else the target's likeliest) the draft cannot
    propose has no loss. weight_VH gets a gradient if it requires one.
    """
    wide, device = torch.promote_types(weight_VH.dtype, torch.float32), weight_VH.device
    sums_5K = torch.zeros(5, labels.slots, dtype=wide, device=device)
    leading_hits = torch.zeros_like(sums_5K[0, 0])
    chunk = losses.chunk_tokens(len(weight_VH) + (0 if teacher is None else teacher.target_vocabulary), device)

    def take_(own: SlotLabels, logits_CV: Tensor) -> Tensor:
        scale_C = _weights(logits_CV, own, weights)
        told = None if teacher is None else teacher.of(own.tokens_R)
        loss, of_rows_5C = taken_(logits_CV, told, own.numbers_R, kind, scale_C)
        sums_5K.index_add_(1, own.slots_R, of_rows_5C)
        leading_hits.add_(own.in_blocks(of_rows_5C[HITS], 0.0).cumprod(-1).sum())
        return loss

    draft = chunked(weight_VH, [hidden_RH], (([part], partial(take_, own)) for part, own in labels.chunks(chunk)))
    reached_K = labels.in_blocks(torch.ones_like(labels.slots_R, dtype=wide), 0.0).sum(0)
    agreements_K = None if teacher is None else sums_5K[AGREES]
    return StepSums(draft, sums_5K[LOSS], sums_5K[INSIDE], reached_K, agreements_K, sums_5K[OWN], None, leading_hits)


def block_bytes(
    target_vocabulary: int, vocabulary: int, slots: int, predicted: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the bytes of logits alive at once in the losses of `predicted` slots, `slots` of a block.

    The draft's in float32, with the target's in float32 and the head's dtype, or in float32 with those over the draft
    vocabulary and their distribution; or with this distribution, a temporary and the gradient in the head's dtype.
    target_vocabulary: number of the target's logits for each slot; 0: none.
    """
    chunk = max(1, losses.chunk_tokens(vocabulary + target_vocabulary, device) // slots) * slots
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    is_reduced = vocabulary < target_vocabulary
    of_target = target_vocabulary and 4 * target_vocabulary + max(narrow * target_vocabulary, 4 * vocabulary * (1 + is_reduced))
    return min(predicted, chunk) * max(4 * vocabulary + of_target, vocabulary * (12 + narrow))
