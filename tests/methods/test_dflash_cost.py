"""A DFlash draft's operations in closed form against torch's own counter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longspec.methods.dflash import method as dflash_method
from longspec.methods.dflash.settings import Settings
from tests.eager import EAGER
from tests.methods.test_dflash import CONFIGS, REDUCED, make
from tests.targets import VOCABULARY

pytestmark = pytest.mark.slow  # half a minute and more as a whole

B, S, W = 2, 20, 4


@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama", {"depth": 2, **REDUCED}), ("qwen3", {"depth": 1, "loss": "hard", "sliding_window": 6})],
)
def test_a_step_is_counted_as_torch_counts_it(name: str, settings: dict[str, Any]) -> None:
    """Dense attention multiplies every pair of slots and keys of a row."""
    made = make(name, dtype=torch.float32, anchors=6, block_size=W, **settings)
    made.states.attention = EAGER
    ids = torch.randint(0, VOCABULARY, (B, S))
    found = made.states(ids, torch.arange(S).expand(B, S), None, ["hidden.1", "hidden.3", "final"])
    made.states.forward = lambda *_: found
    with FlopCounterMode(display=False) as counter:
        output = made(ids, ids, with_llm_loss=False)
        output.loss.backward()
    config, chosen, slots = made.states.config, made.settings, 6 * W
    assert dflash_method.slots_of(replace(chosen, row_tokens=S), B * S) == B * slots
    places = torch.arange(S - 1)  # evenly spread over the anchors there can be
    anchors = places[(places * 6 // (S - 1)) != ((places - 1) * 6 // (S - 1))]
    predicted = B * int(sum((anchors + slot < S).sum() for slot in range(1, W)))
    is_soft = chosen.loss == "soft"
    wanted = dflash_method.projection_operations(config, chosen, B * S)
    wanted += dflash_method.block_operations(config, chosen, B * slots, B * slots * (S + slots))
    wanted += dflash_method.head_operations(config, chosen, predicted, with_teacher=is_soft)
    assert counter.get_total_flops() == wanted


def test_the_whole_is_its_parts() -> None:
    """With every token an anchor, pairs counted one by one in documents that do not see each other."""
    config, window = CONFIGS["llama"], 6
    settings = Settings(layers=(1, 3), depth=2, block_size=W, anchors=40, row_tokens=40, vocabulary=30, sliding_window=window)
    pairs = 0
    for length in (9, 22, 9):
        for place in range(length):
            for slot in range(W):
                pairs += sum(place + slot - key < window for key in range(place)) + slot + 1
    of_layers, of_head = dflash_method.operations(config, settings, 40, [9, 22, 9], 40, with_llm_loss=True)
    projection = dflash_method.projection_operations(config, settings, 40)
    assert of_layers == pytest.approx(projection + dflash_method.block_operations(config, settings, 40 * W, pairs))
    assert of_head == dflash_method.head_operations(config, settings, 40 * (W - 1), with_teacher=True)
