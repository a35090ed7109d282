"""What a recipe says of the made-up draft. No torch: runs are planned by it."""

from dataclasses import dataclass
from typing import Annotated, Any

from longspec.config.schema import Known
from longspec.config.typed import Text, means, words
from longspec.engines import Served

NAMELESS_FILES = False
SERVED: dict[str, Served] = {}
VARIANTS = ("made-up",)
TARGETS: dict[str, str] = {}  # no class of it was ever published
FAMILIES = ("llama", "qwen2")
WHY_THESE = "nobody has tried it beside others"
SAME = ("recipe.draft", ())  # what labels it was trained on is no matter where it is decoded
COUNTS = {"labels_two_ahead": "labels two tokens ahead"}


@dataclass
class Method(Known):
    """The section `recipe.method`: there is one architecture."""

    name: Annotated[Text, means("the method")] = "made_up"


@dataclass
class Draft(Known):
    """The section `recipe.draft`, the variant."""

    labels: Annotated[str, words("hard", "soft"), means("what is learnt: the token after the next, or its distribution")] = (
        "soft"
    )


def of(recipe: Any) -> Draft:
    """The settings that training and decoding need, from a typed recipe."""
    return Draft(labels=recipe.draft.labels)


def check(recipe: Any) -> None:
    """Nothing has to fit together."""


def fits(recipe: Any, layers: int, vocabulary: int) -> None:
    """Any target has a final hidden state."""


def stored(recipe: Any) -> str:
    """The final hidden state."""
    return "final"


def told(recipe: Any) -> list[tuple[tuple[str, ...], str, str]]:
    """Its one setting."""
    return [(("draft.labels",), "labels", recipe.draft.labels)]


def soft_labels(recipe: Any) -> bool:
    """Whether the target's distribution is learnt."""
    return bool(recipe.draft.labels == "soft")


def loss_weight(recipe: Any) -> float:
    """Return 1: each token has one loss."""
    return 1.0
