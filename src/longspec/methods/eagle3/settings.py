"""The recipe's settings of an EAGLE-3 draft (arXiv 2503.01840). Imports no torch: runs are planned with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longspec import families
from longspec.config.ranges import SIZE, TOKENS, Range, check_choices, check_numbers
from longspec.config.schema import LATER
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.eagle3.rope_parameters import check_rope

NAME = "eagle3"
NAMELESS_FILES = False
VLLM_METHOD: str | None = "eagle3"
VARIANTS = ("ttt",)  # of a run that names none
TARGETS: dict[str, str] = {}  # no class was published
FAMILIES = families.FAMILIES  # hidden states are all that is read, and each has them
WHY_THESE = ""
ARCHITECTURE = "LlamaForCausalLMEagle3"
PUBLISHED = (
    ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)  # architectures, as others name them
AUXILIARY = 3  # hidden states of the target that a draft reads; engines know no other number
FEWEST_LAYERS = 7  # of a target: with fewer, two of the default layers 2, L // 2 and L - 3 are the same one
COUNTS = {
    "outside_vocabulary": "no loss: the target prefers a token outside the draft vocabulary",
    "past_document": "no loss: past the document's end",
}
ROPE = "rope_parameters"
SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", ROPE)
NORMS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
# What a draft is: its recipe and its folder must agree in it, and tensors' shapes do not show all of it.
MEANING = ("layers", "fc_norm", "norm_output", "sliding_window", "norm_before_residual", "norm_before_fc", *SHAPE)
RANGES = {
    "vocabulary": TOKENS,
    "sliding_window": TOKENS,
    "intermediate_size": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": Range(2, 2**16),
    "rms_norm_eps": Range(0, 1, open_low=True),
    "steps": Range(1, 64),
    "decay": Range(0.01, 1),
}
STARTS = ("random", "identity")
FRACTIONS = ("rms_norm_eps", "decay")  # of these numbers, those that need not be whole


@dataclass
class Method:
    """The section `recipe.method`: what the draft is."""

    name: str = NAME
    layers: list[int] | None = None  # of the target, whose inputs are read; null: 2, L // 2 and L - 3 of L layers
    vocabulary: int | None = 8192  # tokens that the draft can propose, the most frequent ones; null: all of the target's
    vocabulary_from: str | None = None  # another run, whose vocabulary is taken; null: counted on this run's rows
    sliding_window: int | None = None  # keys its self attention sees, the query's own among them; null: all
    fc_norm: bool = False  # EAGLE-3.1: each auxiliary hidden state has a norm before the projection
    norm_output: bool = False  # EAGLE-3.1: what the draft feeds back is normed
    # The layer adds to the normed feature, not to the feature.
    norm_before_residual: bool = field(default=False, metadata=LATER)
    norm_before_fc: bool = field(default=False, metadata=LATER)  # one norm over all auxiliary states side by side
    # The layer's shape, where it is not the target's; null: the target's.
    intermediate_size: int | None = field(default=None, metadata=LATER)
    num_attention_heads: int | None = field(default=None, metadata=LATER)
    num_key_value_heads: int | None = field(default=None, metadata=LATER)
    head_dim: int | None = field(default=None, metadata=LATER)
    rms_norm_eps: float | None = field(default=None, metadata=LATER)
    rope_parameters: dict[str, Any] | None = field(default=None, metadata=LATER)  # rope_type, rope_theta, and its scaling


@dataclass
class Draft:
    """The section `recipe.draft`, the variant: how it is trained (training-time test, EAGLE-3 section 3.2)."""

    steps: int = 7  # of a chain, each fed with the draft's own hidden state of the step before
    decay: float = 0.8  # step i is weighted decay^i
    start: str = field(default="random", metadata=LATER)  # of an untrained layer; identity: it hands its last input through


def implied(tokens: int) -> dict[str, Any]:
    """Keys of recipe.method that follow from a target of so many tokens: a vocabulary as published drafts have it."""
    return {"vocabulary": 32000 if tokens >= 64000 else 8192 if tokens > 16384 else None}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that the answers of METHOD depend on.

    ids: of the draft vocabulary, which a file holds; None where the draft proposes all tokens, and where nothing is trained or
    decoded, as in an estimate. target_vocabulary: how many tokens these are chosen from.
    """

    layers: tuple[int, ...] | None = None
    vocabulary: int | None = None
    sliding_window: int | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = field(default=False, metadata=LATER)
    norm_before_fc: bool = field(default=False, metadata=LATER)
    intermediate_size: int | None = field(default=None, metadata=LATER)
    num_attention_heads: int | None = field(default=None, metadata=LATER)
    num_key_value_heads: int | None = field(default=None, metadata=LATER)
    head_dim: int | None = field(default=None, metadata=LATER)
    rms_norm_eps: float | None = field(default=None, metadata=LATER)
    rope_parameters: dict[str, Any] | None = field(default=None, metadata=LATER)
    steps: int = 7
    decay: float = 0.8
    start: str = field(default="random", metadata={"stored": False})
    ids: tuple[int, ...] | None = field(default=None, metadata={"stored": False})
    target_vocabulary: int | None = field(default=None, metadata={"stored": False})


def of(recipe: Any, vocabulary: DraftVocabulary | None = None) -> Settings:
    """The settings that training and decoding need, from a typed recipe and the file of its draft vocabulary."""
    method, draft = recipe.method, recipe.draft
    return Settings(
        layers=None if method.layers is None else tuple(method.layers),
        vocabulary=method.vocabulary,
        sliding_window=method.sliding_window,
        **{name: method[name] for name in (*NORMS, *SHAPE) if name != ROPE},
        rope_parameters=None if method.rope_parameters is None else dict(method.rope_parameters),
        steps=draft.steps,
        decay=draft.decay,
        start=draft.start,
        ids=None if vocabulary is None else vocabulary.ids,
        target_vocabulary=None if vocabulary is None else vocabulary.size,
    )


def layers_of(layers: tuple[int, ...] | None, target_layers: int) -> tuple[int, ...]:
    """The auxiliary layers of a target of so many: those that were chosen, or 2, L // 2 and L - 3.

    Raises ValueError, with the key, where these are not three different ones of the target's.
    """
    if target_layers < AUXILIARY:
        raise ValueError(
            f"recipe.method.layers: the target has {target_layers} layers, an EAGLE-3 draft reads {AUXILIARY} different ones: "
            "there is none for this target; train another method"
        )
    if layers is None and target_layers < FEWEST_LAYERS:
        raise ValueError(
            f"recipe.method.layers: must be given for a target of {target_layers} layers, such as "
            f"{[0, target_layers // 2, target_layers - 1]}: the default 2, L // 2 and L - 3 needs {FEWEST_LAYERS} layers"
        )
    chosen = layers or (2, target_layers // 2, target_layers - 3)
    if chosen[-1] >= target_layers:
        raise ValueError(f"recipe.method.layers: {list(chosen)}: the target has layers 0 to {target_layers - 1}")
    return chosen


def check(recipe: Any) -> None:
    """Hold recipe.method and recipe.draft against what a draft can be. Raises ValueError with the key and what is allowed."""
    method, draft = recipe.method, recipe.draft
    check_numbers(method, Method, "recipe.method", RANGES)
    check_numbers(draft, Draft, "recipe.draft", RANGES)
    check_choices(draft, "recipe.draft", {"start": STARTS})
    if method.layers is not None:
        layers = list(method.layers)
        if len(layers) != AUXILIARY or layers != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(
                f"recipe.method.layers: {layers}: must be {AUXILIARY} layers in ascending order, each once, as [2, 16, 29]; "
                "engines collect their hidden states in this order"
            )
    if method.vocabulary_from is not None and method.vocabulary is None:
        raise ValueError("recipe.method.vocabulary_from: recipe.method.vocabulary is null, all tokens are proposed; give both")
    check_shape({name: method[name] for name in SHAPE}, "recipe.method")
    if draft.steps + 1 >= recipe.data.sequence_length:
        raise ValueError(
            f"recipe.draft.steps: chains of {draft.steps} find no place in rows of {recipe.data.sequence_length} tokens "
            "(recipe.data.sequence_length); it must be at least two below"
        )
    if method.sliding_window is not None and method.sliding_window < draft.steps:
        raise ValueError(
            f"recipe.method.sliding_window: {method.sliding_window} keys hide the text from the last of {draft.steps} steps "
            f"(recipe.draft.steps), which sees {draft.steps - 1} of its own chain; give {draft.steps} or more, or fewer steps"
        )


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 draft in one of the layouts in which others publish them."""
    named = config.get("architectures")
    return config.get("speculators_model_type") == NAME or (
        isinstance(named, list) and any(each in PUBLISHED for each in named)
    )


def check_values(values: Mapping[str, Any], section: str, advice: str) -> None:
    """Raise ValueError, with the key and the advice, for a number of a file that is none or lies outside its range."""
    for name, allowed in RANGES.items():
        value = values.get(name)
        kind, kinds = ("a number", (int, float)) if name in FRACTIONS else ("a whole number", (int,))
        if value is None:
            continue
        if type(value) not in kinds:
            raise ValueError(f"{section}: {name}: is {value!r}, must be {kind} {allowed}; {advice}")
        if not allowed.holds(value):
            raise ValueError(f"{section}: {name}: is {value!r}, must be {allowed}; {advice}")


def check_shape(shape: Mapping[str, Any], section: str) -> None:
    """Raise ValueError, with the key, for parts of a layer's shape that no layer has."""
    heads, key_values, width, rope = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", ROPE))
    if width is not None and width % 2:
        raise ValueError(f"{section}.head_dim: {width}: must be even, rotations turn pairs")
    if heads is not None and key_values is not None and heads % key_values:
        raise ValueError(f"{section}.num_key_value_heads: {key_values} do not divide the {heads} of num_attention_heads")
    if rope is not None:
        check_rope(rope, f"{section}.{ROPE}")


def fits(recipe: Any, layers: int, vocabulary: int) -> None:
    """It has the layers that are read, and more tokens than the draft vocabulary."""
    method = recipe.method
    layers_of(None if method.layers is None else tuple(method.layers), layers)
    if method.vocabulary is not None and method.vocabulary >= vocabulary:
        raise ValueError(
            f"recipe.method.vocabulary: {method.vocabulary}: the target has {vocabulary} tokens; give fewer, or null for all"
        )


def check_offline(recipe: Any) -> None:
    """Positions are plain ones, and nothing is drawn."""


def stored(recipe: Any) -> str:
    """The inputs of the auxiliary layers, and what the labels are made of."""
    layers = "default" if recipe.method.layers is None else "-".join(map(str, recipe.method.layers))
    return f"hidden-{layers}-{'final' if recipe.states.top_k is None else f'top{recipe.states.top_k}'}"


def told(recipe: Any) -> list[tuple[tuple[str, ...], str, str]]:
    """The layers that are read, the tokens that are proposed, and the chain that is trained."""
    method, draft = recipe.method, recipe.draft
    layers = "2, L // 2, L - 3" if method.layers is None else ", ".join(map(str, method.layers))
    size = "all of the target's" if method.vocabulary is None else f"{method.vocabulary:,}"
    lender = "" if method.vocabulary_from is None else f", of {method.vocabulary_from}"
    window = "none" if method.sliding_window is None else str(method.sliding_window)
    rows: list[tuple[tuple[str, ...], str, str]] = [
        (("method.layers",), "layers read", layers),
        (("method.vocabulary", "method.vocabulary_from"), "draft vocabulary, tokens", f"{size}{lender}"),
        (("draft.steps", "draft.decay"), "chain", f"{draft.steps} steps, weighted {draft.decay:g}^i"),
        (("method.sliding_window",), "attention window, tokens", window),
    ]
    # Drafts that were begun elsewhere are seldom shaped and normed as ours by default.
    own = {name: method[name] for name in ("norm_before_residual", "norm_before_fc", *SHAPE)}
    values = {name: value for name, value in own.items() if value not in (None, False)}
    if values:
        words = ", ".join(name if value is True else f"{name} {value}" for name, value in values.items())
        rows.append((tuple(f"method.{name}" for name in values), "of its own", words))
    return rows


def layer_weights(sizes: Any, method: Any = None) -> int:
    """A decoder layer of the target's shape, or of its own, whose queries, keys and values have inputs of twice the width.

    The projection of the target's hidden states is read once a round, and is left out.
    """
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    of_target = (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim, ffn_width(sizes))
    own = [None if method is None else method[name] for name in names]
    heads, key_values, width, inner = (mine or default for mine, default in zip(own, of_target, strict=True))
    return sizes.hidden_size * (width * (3 * heads + 4 * key_values) + 3 * inner)


def ffn_width(target: Any) -> int:
    """Feed-forward width of a draft beside a target of this configuration, or of such sizes, where it has none of its own.

    GPT-OSS's `intermediate_size` is that of one expert; the drafts that were published for it have 6 times the hidden width.
    """
    return int(6 * target.hidden_size if target.model_type == "gpt_oss" else target.intermediate_size)


def soft_labels(recipe: Any) -> bool:
    """The target's distribution over the draft vocabulary is learnt."""
    return True
