"""What a recipe may say of an EAGLE-3 draft, at the edges of what is allowed."""

import json
import re

import pytest

from longspec.methods.eagle3 import settings as eagle3
from longspec.models.attention.visibility import Visibility
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


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6])
def test_layers_that_are_advised_are_allowed(layers: int) -> None:
    """A small target needs layers of its own; one with fewer than are read has no such draft, whatever is given."""
    with pytest.raises(ValueError, match=r"^recipe\.method\.layers: ") as told:
        eagle3.layers_of(None, layers)
    advised = re.search(r"such as (\[.*?\])", str(told.value))
    if layers < 3:
        assert advised is None
        assert f"the target has {layers} layers, an EAGLE-3 draft reads 3 different ones" in str(told.value)
        with pytest.raises(ValueError, match="there is none for this target"):
            eagle3.layers_of((0, 1, 2), layers)
    else:
        assert advised is not None
        chosen = json.loads(advised[1])
        eagle3.check(recipe_of(layers=chosen))
        assert eagle3.layers_of(tuple(chosen), layers) == tuple(chosen)


def test_settings_are_given_by_name() -> None:
    """Nine values in a row hide which is which."""
    with pytest.raises(TypeError, match="positional"):
        eagle3.Settings((0, 1, 2), 8)  # type: ignore[misc]
