"""Checks the inputs of a draft's forward, by name, before a kernel would crash on them or compute something else."""

import torch
from torch import Tensor

NO_LABEL = -100


def check_inputs(
    input_ids: Tensor, position_ids: Tensor | None, num_labels: int | Tensor | None, **others: Tensor | None
) -> Tensor:
    """The positions [B, S], plain ones for None.

    Raises ValueError unless input_ids is int64 [B, S], all others are like it or None, and num_labels is None or above 0.
    """
    others["position_ids"] = position_ids
    for name, tensor in {"input_ids": input_ids, **others}.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name}: must be int64, is {tensor.dtype}")
        if tensor.ndim != 2 or tensor.shape != input_ids.shape:
            wanted = "[B, S]" if name == "input_ids" else f"{list(input_ids.shape)} like input_ids"
            raise ValueError(f"{name}: must be {wanted}, is {list(tensor.shape)}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: holds no token, is {list(input_ids.shape)}")
    if num_labels is not None and num_labels <= 0:
        raise ValueError(f"num_labels: must be above 0, is {num_labels}")
    return (
        torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids) if position_ids is None else position_ids
    )


def check_ranges(
    input_ids: Tensor, labels: Tensor, position_ids: Tensor, lag_B: Tensor | None, vocabulary: int, positions: int
) -> None:
    """Ids in 0..vocabulary-1, labels those or -100, positions in 0..positions-1, lags from 1. Raises ValueError."""
    ranges = {
        "input_ids": (input_ids, 0, vocabulary - 1, "the target's vocabulary"),
        "labels": (labels.where(labels != NO_LABEL, 0), 0, vocabulary - 1, f"the target's vocabulary, or {NO_LABEL}"),
        "position_ids": (position_ids, 0, positions - 1, "the target's max_position_embeddings"),
    }
    if lag_B is not None:
        ranges["lag"] = (lag_B, 1, torch.iinfo(torch.int64).max, "a draft never sees the target's key of its own token")
    # One transfer from the device for all of them.
    extremes = torch.stack([torch.stack(tensor.aminmax()) for tensor, *_ in ranges.values()]).tolist()
    for (name, (_, least, most, why)), (low, high) in zip(ranges.items(), extremes, strict=True):
        if low < least or high > most:
            wrong = low if low < least else high
            raise ValueError(f"{name}: {wrong} lies outside {least}..{most if name != 'lag' else ''} ({why})")
