"""The recipe's settings of a GLIDE draft (LongSpec, arXiv 2502.17421). Imports no torch: runs are planned with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from longspec.config.ranges import TOKENS, Range, check_choices, check_numbers
from longspec.config.schema import LATER

BLOCKS = "blocks"
RANDOM, LAST, MIDDLE = "random", "last", "middle"
NAMELESS_FILES = True  # draft_model_weights.pth, as published, comes without a configuration
VARIANTS: tuple[str, ...] = ()  # those of config/workflow.yaml
VLLM_METHOD: str | None = None  # no engine loads what reads the target's own keys and values
CHOICES = {
    "anchors": ("off", "fixed", "random"),
    "lag_mode": ("random", "fixed", BLOCKS),
    "loss": ("hard", "soft", "mix"),
    "start": (RANDOM, LAST, MIDDLE),
}
RANGES = {
    "window": TOKENS,
    "anchor_tokens": TOKENS,
    "anchors_up_to": Range(0, TOKENS.high),
    "max_position": TOKENS,
    "lag": TOKENS,
    "block": TOKENS,
    "temperature": Range(0.01, 100),  # below, float32 overflows; above, every token is as likely as the next
}

COUNTS: dict[str, str] = {}

# The class that the frozen recipe of a target of each model type names.
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3"}
TARGETS = {
    model_type: f"longspec.train.models.{name.lower()}_glide.{name}Glide.from_pretrained"
    for model_type, name in _CLASSES.items()
}
FAMILIES = tuple(TARGETS)
WHY_THESE = "its layer is shaped like that of these families, and reads the rotated keys and values of the target's last layer"


def implied(tokens: int) -> dict[str, Any]:
    """Keys of recipe.method of a run that says none: none."""
    return {}


@dataclass
class Method:
    """The section `recipe.method`: GLIDE has one architecture."""

    name: str = "glide"


@dataclass
class Draft:
    """The section `recipe.draft`, the variant: how the draft sees the target while it trains (LongSpec 3.1, 3.2)."""

    window: int = 512  # key j is visible to query i when 0 <= i - j <= window
    anchors: str = MISSING  # off | fixed (`anchor_tokens` of them) | random (0..anchor_tokens)
    anchor_tokens: int = 4
    anchors_up_to: int = 1200  # rows of more tokens keep plain positions
    max_position: int = 30000  # anchor-offset positions stay below it
    lag_mode: str = MISSING  # random (1..lag) | fixed (lag) | blocks (of `block` tokens)
    lag: int = 5  # as deep as the default tree of decoding, [4, 16, 16, 16, 16]; published: 4
    block: int = 4
    final_norm: bool = False  # a trained norm between the draft and the target's head; published: none
    loss: str = "soft"  # hard: the next token; soft: the target's distribution; mix: their mean
    temperature: float = 1.0  # of the soft labels
    # Of an untrained layer: random | last, middle: the target's layer of that place, copied.
    start: str = field(default=RANDOM, metadata=LATER | {"stored": False})


def is_published(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json names a GLIDE layer as LongSpec published them, such as Qwen2GlideDecoderLayer."""
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(each, str) and "Glide" in each for each in named)


def of(recipe: Any) -> Draft:
    """The settings that training and decoding need, from a typed recipe."""
    return Draft(**{field.name: recipe.draft[field.name] for field in fields(Draft)})


def check(recipe: Any) -> None:
    """Hold recipe.draft against what a draft can be. Raises ValueError with the key, its value and what is allowed."""
    draft, length = recipe.draft, recipe.data.sequence_length
    check_choices(draft, "recipe.draft", CHOICES)
    check_numbers(draft, Draft, "recipe.draft", RANGES)
    field = "block" if draft.lag_mode == BLOCKS else "lag"
    if draft[field] >= length:
        raise ValueError(
            f"recipe.draft.{field}: {draft[field]} hides the target from every token of a row of {length} "
            "(recipe.data.sequence_length); it must be below"
        )


def fits(recipe: Any, layers: int, vocabulary: int) -> None:
    """Any target has a last layer with keys and values."""


def check_offline(recipe: Any) -> None:
    """Anchor-offset positions, drawn anew in each step, change what every layer of the target computes."""
    draft, length = recipe.draft, recipe.data.sequence_length
    if draft.start != RANDOM:
        raise ValueError(
            f"recipe.draft.start: {draft.start}: copies a layer of the target, which is not there where its states are stored; "
            f"set it to {RANDOM}, or recipe.states.source to online"
        )
    if draft.anchors != "off" and length <= draft.anchors_up_to:
        raise ValueError(
            f"recipe.draft.anchors: {draft.anchors}: positions of rows of {length} tokens (recipe.data.sequence_length) are "
            "drawn anew in every step, so that the target's states cannot be stored; train this stage with "
            "recipe.states.source: online (a run's other stages may stay offline), or set recipe.draft.anchors: off"
        )


def stored(recipe: Any) -> str:
    """The last layer's keys and values, and what the labels are made of."""
    if recipe.states.top_k is not None:
        return f"last-keys-values-top{recipe.states.top_k}-t{recipe.draft.temperature:g}"
    return "last-keys-values-final" if soft_labels(recipe) else "last-keys-values"


def told(recipe: Any) -> list[tuple[tuple[str, ...], str, str]]:
    """The loss, and what the draft sees of text and target in rows of this length."""
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


def layer_weights(sizes: Any, method: Any = None) -> int:
    """A decoder layer of the target's shape, and the cross attention's queries and output."""
    queries = sizes.hidden_size * sizes.num_attention_heads * sizes.head_dim
    keys = sizes.hidden_size * sizes.num_key_value_heads * sizes.head_dim
    return 4 * queries + 2 * keys + 3 * sizes.hidden_size * sizes.intermediate_size


def soft_labels(recipe: Any) -> bool:
    """Whether the target's distribution is learnt, by itself or beside the next token."""
    return bool(recipe.draft.loss != "hard")
