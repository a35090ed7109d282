"""Checks the inputs of a draft's forward, by name, before a kernel would crash on them or compute something else."""

import torch
from torch import Tensor

NO_LABEL = -100


def check_shapes(input_ids: Tensor, **others: Tensor | None) -> None:
    """input_ids must be int64 [B, S], and the others like it or None. Raises ValueError."""
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


def lag_per_row(lag: int | Tensor | None, input_ids: Tensor) -> Tensor:
    """The lag as int64 [B]; None = 1. Raises ValueError for a tensor of another shape or dtype."""
    batch = input_ids.shape[0]
    if not isinstance(lag, Tensor):
        lag = torch.full((batch,), 1 if lag is None else lag)
    if lag.dtype != torch.int64:
        raise ValueError(f"lag: must be int64, is {lag.dtype}")
    if lag.shape != (batch,):
        raise ValueError(f"lag: must hold one number for each of the {batch} rows, is of shape {list(lag.shape)}")
    return lag.to(input_ids.device)


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
