"""A GLIDE draft's operations in closed form, less what tests/train/estimate/test_flops.py compares with torch's own counter."""

from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from longspec.methods.glide import method as glide_method
from longspec.methods.glide.settings import Draft
from longspec.models.attention.visibility import Visibility, block_pairs, causal_pairs

HEADS, HIDDEN, VOCABULARY = 4, 32, 97
CONFIG = Qwen2Config(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2, vocab_size=VOCABULARY)


def seen(length: int, **visibility: Any) -> int:
    """Pairs the masks leave, counted one by one."""
    first_BS, last_BS = Visibility(**visibility).bounds_BS(length, length, torch.device("cpu"))
    return int((last_BS - first_BS + 1).clamp(min=0).sum())


@pytest.mark.parametrize("length", [1, 8, 30])
def test_pairs_are_those_the_masks_leave(length: int) -> None:
    assert causal_pairs(length) == seen(length)
    for window in (0, 1, 5, 8, 40):
        assert causal_pairs(length, window) == seen(length, window=window)
    for lag in (1, 2, 4, 31):
        assert causal_pairs(length, lag=lag) == seen(length, lag_B=torch.tensor([lag]))
        assert causal_pairs(length, 5, lag) == seen(length, window=5, lag_B=torch.tensor([lag]))
    for block in (1, 4, 9):
        assert block_pairs(length, block) == seen(length, lag_blocks=block)


def test_random_lags_count_as_their_mean() -> None:
    every = [seen(30, lag_B=torch.tensor([lag])) for lag in (1, 2, 3, 4)]
    assert glide_method.cross_pairs(30, Draft(anchors="off", lag_mode="random", lag=4)) == sum(every) / 4
    assert glide_method.cross_pairs(30, Draft(anchors="off", lag_mode="fixed", lag=4)) == every[3]


@pytest.mark.parametrize(
    ("lag_mode", "cross"),
    [
        ("blocks", seen(9, lag_blocks=4) + 2 * seen(20, lag_blocks=4)),
        ("fixed", seen(9, lag_B=torch.tensor([3])) + 2 * seen(20, lag_B=torch.tensor([3]))),
    ],
)
def test_documents_do_not_see_each_other(lag_mode: str, cross: int) -> None:
    """Without tokens there are no products but those of the attention."""
    draft = Draft(anchors="off", lag_mode=lag_mode, lag=3, block=4, window=5)
    own = seen(9, window=5) + 2 * seen(20, window=5)
    of_layer, of_head = glide_method.operations(CONFIG, draft, 0, [20, 9, 20], 0, with_llm_loss=True)
    assert of_layer == HIDDEN * (12 * own + 8 * cross)
    assert of_head == 0
