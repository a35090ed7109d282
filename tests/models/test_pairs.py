"""The pairs of attention against the masks themselves."""

from typing import Any

import pytest
import torch

from longspec.models.attention.visibility import Visibility, block_pairs, causal_pairs


def seen(length: int, **visibility: Any) -> int:
    """Pairs the masks leave, counted one by one."""
    first_BS, last_BS = Visibility(**visibility).bounds_BS(length, length, torch.device("cpu"))
    return int((last_BS - first_BS + 1).clamp(min=0).sum())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 30])
def test_pairs_are_those_the_masks_leave(length: int) -> None:
    assert causal_pairs(length) == seen(length)
    for window in (0, 1, 5, 8, 40):
        assert causal_pairs(length, window) == seen(length, window=window)
    for lag in (1, 2, 4, 31):
        assert causal_pairs(length, lag=lag) == seen(length, lag_B=torch.tensor([lag]))
        assert causal_pairs(length, 5, lag) == seen(length, window=5, lag_B=torch.tensor([lag]))
    for block in (1, 4, 9):
        assert block_pairs(length, block) == seen(length, lag_blocks=block)
