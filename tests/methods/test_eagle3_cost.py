"""An EAGLE-3 draft's operations in closed form against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longspec.methods.eagle3 import method as eagle3_method
from tests.methods.test_eagle3 import CONFIGS, REDUCED, make
from tests.targets import VOCABULARY

pytestmark = pytest.mark.slow  # half a minute and more as a whole

B, S = 2, 20


@pytest.mark.parametrize(
    ("name", "settings"),
    list(zip(CONFIGS, [{"steps": 7, **REDUCED}, {"steps": 2, "fc_norm": True, "sliding_window": 5}], strict=True)),
)
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
    wanted = eagle3_method.projection_operations(config, chosen, B * (S - 2)) + eagle3_method.head_operations(
        config, chosen, int(trained.sum()), rows
    )
    wanted += sum(eagle3_method.step_operations(config, B * count, B * count * count) for count in chains)
    assert counter.get_total_flops() == wanted
