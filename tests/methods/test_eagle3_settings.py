"""What a recipe may say of an EAGLE-3 draft, at the edges of what is allowed."""

import json
import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from longspec.methods.eagle3 import settings as eagle3
from longspec.models.attention.visibility import Visibility
from longspec.models.draft_attention import Rotation
from tests.draft.eagle3_drafts import recipe_of

STEPS = 5  # of recipe_of


def test_a_window_shows_the_text_in_every_step() -> None:
    """As many keys as steps: the last step sees its own chain and the text's newest key, and with one key less no text."""
    eagle3.check(recipe_of(sliding_window=STEPS))
    for window, keys in ((STEPS, [1]), (STEPS - 1, [0])):
        of_last_step = Visibility(window=window - 1 - (STEPS - 1))
        first, last = of_last_step.bounds_BS(1, 9, "cpu")
        assert (last - first + 1).flatten().tolist() == keys
    message = r"recipe\.method\.sliding_window: 4 keys hide the text from the last of 5 steps .*which sees 4 .*give 5"
    with pytest.raises(ValueError, match=message):
        eagle3.check(recipe_of(sliding_window=STEPS - 1))


@pytest.mark.parametrize("layers", [3, 6])
def test_layers_that_are_advised_are_allowed(layers: int) -> None:
    """A small target needs layers of its own."""
    with pytest.raises(ValueError, match=r"^recipe\.method\.layers: ") as told:
        eagle3.fits(recipe_of(), layers, 97)
    advised = re.search(r"such as (\[.*?\])", str(told.value))
    assert advised is not None
    recipe = recipe_of(layers=json.loads(advised[1]))
    eagle3.check(recipe)
    eagle3.fits(recipe, layers, 97)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 1.0, "factor": None},
        YARN | {"beta_fast": 32, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0},
        LLAMA3,
    ],
)
def test_a_rotation_that_is_allowed_turns(rope: dict[str, Any]) -> None:
    """What passes the plan has every number that the layer's rotation reads, and turns whole heads."""
    eagle3.check(recipe_of(rope_parameters=rope))
    config = LlamaConfig(num_attention_heads=1, hidden_size=8, max_position_embeddings=256)
    config.rope_parameters = rope
    cos_BSD, _ = Rotation(config)(torch.ones(1), torch.arange(3)[None])
    assert cos_BSD.shape == (1, 3, 8)
    assert bool(cos_BSD.isfinite().all())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: rope_type yarn has .* alone; leave it out"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "factor, original_max_position_embeddings: missing; rope_type yarn needs"),
        ({"rope_type": "default", "rope_theta": "abc"}, "rope_theta: is 'abc', must be a number above 0"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0},
            "factor: rope_type default has rope_theta alone; leave it",
        ),
        ({"rope_type": ["yarn"], "rope_theta": 1e4}, r"rope_type \['yarn'\] is not supported"),
    ],
)
def test_a_rotation_that_the_layer_cannot_turn_by_is_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^recipe\.method\.rope_parameters: {message}"):
        eagle3.check(recipe_of(rope_parameters=rope))
