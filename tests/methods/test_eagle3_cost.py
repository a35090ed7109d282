"""An EAGLE-3 draft's operations in closed form against torch's own counter, and its memory against what is held."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longspec.methods.eagle3 import cost
from longspec.methods.eagle3.settings import Settings
from tests.methods.test_eagle3 import CONFIGS, REDUCED, make
from tests.targets import VOCABULARY

B, S = 2, 20


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("settings", [{"steps": 7, **REDUCED}, {"steps": 2, "fc_norm": True, "sliding_window": 5}])
def test_a_step_is_counted_as_torch_counts_it(name: str, settings: dict[str, object]) -> None:
    """Dense attention multiplies every pair of the text; a chain's own few keys are no product to torch."""
    made = make(name, dtype=torch.float32, **settings)
    ids = torch.randint(0, VOCABULARY, (B, S))
    labels = ids.clone()
    labels[:, ::3] = -100
    trained = labels[:, 1:] != -100
    found = made.states(ids, torch.arange(S).expand(B, S), None, ["hidden.0", "hidden.1", "hidden.2", "final"])
    made.states.forward = lambda *_: found
    with FlopCounterMode(display=False) as counter:
        made(ids, labels).loss.backward()
    config, chosen, steps = made.states.config, made.settings, range(made.settings.steps)
    chains = [S - 2 - step for step in steps]
    rows = sum(int(trained[:, 1 + step :].sum()) for step in steps)
    wanted = cost.projection_operations(config, chosen, B * (S - 2)) + cost.head_operations(
        config, chosen, int(trained.sum()), rows
    )
    wanted += sum(cost.step_operations(config, B * count, B * count * count) for count in chains)
    assert counter.get_total_flops() == wanted


@pytest.mark.parametrize("window", [None, 6])
def test_the_whole_is_its_parts(window: int | None) -> None:
    """Pairs counted one by one in documents that do not see each other."""
    config, settings = CONFIGS["llama"], Settings(layers=(0, 1, 2), steps=4, sliding_window=window, vocabulary=40)
    pairs = [0] * settings.steps
    for length in (9, 20, 9):
        for step in range(settings.steps):
            for query in range(length):
                text = [key for key in range(query + 1) if window is None or query + step - key < window]
                pairs[step] += len(text) + step
    counted = cost.operations(config, settings, 50, [9, 20, 9], 30)
    projection = cost.projection_operations(config, settings, 50)
    assert counted.draft == projection + sum(cost.step_operations(config, 50, each) for each in pairs)
    assert counted.head == cost.head_operations(config, settings, 30, 4 * 30)
