"""Compute soft cross entropy of a chain's steps over a part of the target's vocabulary, with a trained head; in chunks.

The target's distribution after a token is computed once and serves all steps that predict the next token.

Shapes: N tokens, K steps, M rows of one step, R rows of a chunk, one step after another, H hidden width, V draft vocabulary.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from longspec.config.schema import SOFT
from longspec.models import losses
from longspec.models.losses import AGREES, INSIDE, LOSS, OWN, Chunk, StepSums, chunked, taken_
from longspec.models.teachers import Labels, Teacher


def chain_cross_entropy(
    weight_VH: Tensor, hidden: list[Tensor], teacher: Teacher, places: list[Tensor], weights: list[float], kind: str = SOFT
) -> StepSums:
    """Return sums of the losses of logits hidden @ weight_VH.T against the target's distribution over the draft vocabulary.

    Rows whose likeliest target token the draft cannot propose have no loss. hidden: [M, H] for each step; places: int64 [M] for
    each step, ascending: the tokens, of the N, whose next token its rows predict; weights: of each step's loss. kind: soft, or
    tv or lk instead (teachers.py).
    """
    wide, device = torch.promote_types(weight_VH.dtype, torch.float32), weight_VH.device
    sums_5K, target = torch.zeros(5, len(places), dtype=wide, device=device), torch.zeros((), dtype=wide, device=device)
    # The logits of the target and of all steps of the draft are alive together.
    chunk = losses.chunk_tokens(teacher.target_vocabulary + len(places) * len(weight_VH), device)

    def take_(labels: Labels, places_of_chunk: list[Tensor], logits_RV: Tensor) -> Tensor:
        loss = torch.zeros_like(target)
        for step, logits_MV in enumerate(logits_RV.split([len(place_M) for place_M in places_of_chunk])):
            of_step, of_rows = taken_(logits_MV, labels.of(places_of_chunk[step]), None, kind, weights[step])
            sums_5K[:, step] += of_rows.sum(1)
            loss += of_step
        return loss

    def chunks() -> Iterator[Chunk]:
        edges = torch.arange(0, len(teacher) + chunk, chunk, device=device)
        rows_before = torch.stack([torch.searchsorted(place_M, edges) for place_M in places]).tolist()  # one transfer
        for number, first in enumerate(range(0, len(teacher), chunk)):
            cuts = [slice(*before[number : number + 2]) for before in rows_before]
            labels = teacher.of(slice(first, first + chunk))
            target.add_(labels.own_loss_N.sum())
            yield cuts, partial(take_, labels, [place_M[rows] - first for place_M, rows in zip(places, cuts, strict=True)])
            del labels

    draft = chunked(weight_VH, hidden, chunks())
    reached_K = torch.tensor([len(place_M) for place_M in places], dtype=wide, device=device)
    own = (sums_5K[OWN], target) if teacher.with_loss else (None, None)
    return StepSums(draft, sums_5K[LOSS], sums_5K[INSIDE], reached_K, sums_5K[AGREES], *own)


def chain_bytes(
    target_vocabulary: int, vocabulary: int, steps: int, tokens: int, dtype: torch.dtype, device: torch.device, *, sparse: bool
) -> int:
    """Return the bytes of logits alive at once in the losses of so many tokens.

    The target's in float32 twice and once in the head's dtype; or, over the draft vocabulary, its distribution, all steps'
    logits, and three temporaries of a step or all steps' logits in the head's dtype. sparse: a sparse teacher has none on the
    target's side, and a step one temporary.
    """
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    if sparse:
        chunk = min(tokens, losses.chunk_tokens(steps * vocabulary, device))
        return chunk * vocabulary * (4 * steps + max(4, narrow * steps))
    chunk = min(tokens, losses.chunk_tokens(target_vocabulary + steps * vocabulary, device))
    of_target = (8 + narrow) * target_vocabulary
    return chunk * max(of_target, vocabulary * (4 + 4 * steps + max(12, narrow * steps)))
