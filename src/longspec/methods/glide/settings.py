"""Define a GLIDE draft's settings in a recipe (LongSpec, arXiv 2502.17421). No torch: runs are planned with this module."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import Field

from longspec.config.schema import HARD, LATER, LK, OFFLINE, SOFT, TV, Known
from longspec.config.typed import MOST_TOKENS, Flag, Number, Text, Tokens, Whole, means, words
from longspec.engines import VLLM, Served

BLOCKS = "blocks"
RANDOM, LAST, MIDDLE = "random", "last", "middle"
PUBLISHED = "Glide"  # as in Qwen2GlideDecoderLayer
NAMELESS_FILES = True  # draft_model_weights.pth, as published, comes without a configuration
VARIANTS: tuple[str, ...] = ()  # config/workflow.yaml names them
SERVED = {VLLM: Served("draft_model", "vllm")}  # needs the plugin of plugins/vllm
ANCHORS, LAG_MODES, LOSSES = ("off", "fixed", "random"), ("random", "fixed", BLOCKS), (HARD, SOFT, "mix", TV, LK)

COUNTS: dict[str, str] = {}
# The settings that decoding reads. The others concern training alone, and a later stage may set them differently.
SAME = ("recipe.draft", ("window", "final_norm"))

# Model type -> the class named in the frozen recipe of such a target.
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3"}
TARGETS = {
    model_type: f"longspec.train.models.{name.lower()}_glide.{name}Glide.from_pretrained"
    for model_type, name in _CLASSES.items()
}
FAMILIES = tuple(TARGETS)
WHY_THESE = "its layer is shaped like that of these families, and reads the rotated keys and values of the target's last layer"


@dataclass
class Method(Known):
    """The section `recipe.method`: GLIDE has one architecture."""

    name: Annotated[Text, means("the method, a file of config/method/")] = "glide"


@dataclass
class Draft(Known):
    """The section `recipe.draft`, the variant: how the draft sees the target while it trains (LongSpec 3.1, 3.2)."""

    window: Annotated[Tokens, means("how far back a query i sees: key j where 0 <= i - j <= window")] = 512
    anchors: Annotated[
        str, words(*ANCHORS), means("how many first tokens keep their positions: none, anchor_tokens of them, or 0 to so many")
    ] = MISSING
    anchor_tokens: Annotated[Tokens, means("the number of these tokens")] = 4
    anchors_up_to: Annotated[
        Whole, Field(ge=0, le=MOST_TOKENS), means("the length of a row above which all positions are plain")
    ] = 1200
    max_position: Annotated[Tokens, means("the position below which anchor-offset positions stay")] = 30000
    lag_mode: Annotated[
        str,
        words(*LAG_MODES),
        means("how many last tokens of the target are hidden: 1 to lag, lag, or blocks of `block` tokens"),
    ] = MISSING
    # As deep as the default tree of decoding, [4, 16, 16, 16, 16]; published: 4.
    lag: Annotated[Tokens, means("the most tokens of the target that are hidden")] = 5
    block: Annotated[Tokens, means("the number of tokens of a block, where lag_mode is blocks")] = 4
    final_norm: Annotated[
        Flag, means("whether a trained norm stands between draft and head; the published drafts have none")
    ] = False
    loss: Annotated[
        str,
        words(*LOSSES),
        means("what is learnt: the text, the target's distribution, their mean; or this by total variation or LK's hybrid"),
    ] = SOFT
    # Below, float32 overflows; above, every token is as likely as the next.
    temperature: Annotated[Number, Field(ge=0.01, le=100), means("the temperature of the soft labels")] = 1.0
    start: Annotated[
        str,
        words(RANDOM, LAST, MIDDLE),
        means("what an untrained layer is: random, or a copy of the target's layer of that place"),
    ] = field(default=RANDOM, metadata=LATER | {"stored": False})


def of(recipe: Any) -> Draft:
    """Return the settings for training and decoding, from a typed recipe."""
    return Draft(**{field.name: recipe.draft[field.name] for field in fields(Draft)})


def check(recipe: Any) -> None:
    """Check recipe.draft against the rows and states that it is trained on.

    Raises ValueError with the key and what is allowed.
    """
    draft, length = recipe.draft, recipe.data.sequence_length
    field = "block" if draft.lag_mode == BLOCKS else "lag"
    if draft[field] >= length:
        raise ValueError(
            f"recipe.draft.{field}: {draft[field]} hides the target from every token of a row of {length} "
            "(recipe.data.sequence_length); it must be below"
        )
    if recipe.states.source != OFFLINE:
        return
    if draft.start != RANDOM:
        raise ValueError(
            f"recipe.draft.start: {draft.start}: copies a layer of the target, which is not there where its states are stored; "
            f"set it to {RANDOM}, or recipe.states.source to online"
        )
    if draft.anchors != "off" and length <= draft.anchors_up_to:  # they change what every layer of the target computes
        raise ValueError(
            f"recipe.draft.anchors: {draft.anchors}: positions of rows of {length} tokens (recipe.data.sequence_length) are "
            "drawn anew in every step, so that the target's states cannot be stored; train this stage with "
            "recipe.states.source: online (a run's other stages may stay offline), or set recipe.draft.anchors: off"
        )


def fits(recipe: Any, layers: int, vocabulary: int) -> None:
    """Accept any target: each has a last layer with keys and values."""


def stored(recipe: Any) -> str:
    """Return a word for the last layer's keys and values and for what the labels are made of."""
    if recipe.states.top_k is not None:
        return f"last-keys-values-top{recipe.states.top_k}-t{recipe.draft.temperature:g}"
    return "last-keys-values-final" if soft_labels(recipe) else "last-keys-values"


def told(recipe: Any) -> list[tuple[tuple[str, ...], str, str]]:
    """Return a report's rows: the loss, and what the draft sees of text and target in rows of this length."""
    draft, anchors, lag = recipe.draft, recipe.draft.anchors, f"{recipe.draft.lag_mode}, "
    if anchors != "off" and recipe.data.sequence_length > draft.anchors_up_to:
        anchors = f"plain (rows above {draft.anchors_up_to:,})"
    elif anchors != "off":
        anchors = f"{anchors}, {'up to ' if anchors == 'random' else ''}{draft.anchor_tokens}"
    return [
        (("draft.loss",), "loss", draft.loss),
        (("draft.anchors", "draft.anchor_tokens"), "anchor positions", anchors),
        (("draft.lag_mode", "draft.lag"), "lag", f"{lag}{'1–' if draft.lag_mode == 'random' else ''}{draft.lag}"),
        (("draft.window",), "attention window, tokens", str(draft.window)),
    ]


def soft_labels(recipe: Any) -> bool:
    """Tell whether the target's distribution is learnt, by itself or with the next token."""
    return bool(recipe.draft.loss != HARD)


def loss_weight(recipe: Any) -> float | None:
    """Return 1; None for tv and lk, and for soft labels at a temperature other than 1, whose loss is not in nats."""
    if recipe.draft.loss == HARD:
        return 1.0
    return None if recipe.draft.loss in (TV, LK) or recipe.draft.temperature != 1 else 1.0
