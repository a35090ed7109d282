"""An EAGLE-3 draft's operations in closed form against torch's own counter, and its memory against what is held."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from longspec.methods.eagle3 import method as eagle3_method
from longspec.methods.eagle3.method import METHOD
from longspec.methods.eagle3.settings import Settings
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.estimate.memory import parameter_bytes
from tests.methods.test_eagle3 import CONFIGS, LAYERS, REDUCED, make
from tests.targets import VOCABULARY
from tests.train.estimate.test_memory import LiveBytes

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


WIDE = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
SHAPES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "plain": (WIDE, 1024, {"steps": 7, "vocabulary": 256}),
    "long vocabulary": (WIDE | {"vocab_size": 4096, "hidden_size": 64}, 512, {"steps": 7, "vocabulary": 1024}),
    "many keys": (WIDE | {"num_key_value_heads": 8}, 1024, {"steps": 7, "vocabulary": 256, "fc_norm": True}),
}


def measured(config: PretrainedConfig, settings: Settings, tokens: int, dtype: torch.dtype) -> int:
    """The peak of the draft's forward and backward, weights, gradients and what is kept of the target aside."""
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    states = TargetStates(target.requires_grad_(False).eval(), attention="sdpa")
    made, ids, positions = (
        METHOD.trainer(states, settings, None),
        torch.arange(tokens)[None] % config.vocab_size,
        torch.arange(tokens),
    )
    found = states(ids, positions[None], None, [f"hidden.{layer}" for layer in LAYERS] + ["final"])
    states.forward = lambda *_: found
    own = made.draft_model
    with LiveBytes([*target.parameters(), *own.parameters(), *own.buffers(), *found.values()]) as live:
        loss = made(ids, ids).loss
        forward, live.peak = live.peak, live.live
        loss.backward()
    return max(forward, live.peak - parameter_bytes(own))


@pytest.mark.parametrize(("name", "dtype"), list(zip(SHAPES, [torch.float32, torch.bfloat16, torch.bfloat16], strict=True)))
def test_memory_is_within_a_tenth(name: str, dtype: torch.dtype) -> None:
    shape, tokens, chosen = SHAPES[name]
    config = Qwen2Config(**shape, num_hidden_layers=3, tie_word_embeddings=False)
    proposed = chosen.get("vocabulary")
    ids = {} if proposed is None else {"ids": tuple(range(proposed)), "target_vocabulary": config.vocab_size}
    settings = Settings(layers=LAYERS, **chosen, **ids)
    estimate = eagle3_method.memory(config, settings, tokens, dtype, torch.device("cpu"))
    peak = measured(config, settings, tokens, dtype)
    assert peak * 0.9 < estimate.kept + max(estimate.losses, estimate.backward) < peak * 1.1
