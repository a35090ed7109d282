"""Define an EAGLE-3 draft's settings in a recipe (arXiv 2503.01840), and check them against its target.

Imports no torch: runs are planned with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from longspec import families
from longspec.config.schema import LATER, LK, SOFT, TV, Known
from longspec.config.typed import Flag, Number, Text, Whole, means, words
from longspec.draft_vocabulary import DraftVocabulary
from longspec.engines import LLAMA_CPP, OPENVINO, VLLM, Served
from longspec.methods import layer_shape

NAME = "eagle3"
NAMELESS_FILES = False
SERVED = {
    VLLM: Served("eagle3"),
    LLAMA_CPP: Served("draft-eagle3", "gguf", windows=False),
    OPENVINO: Served("eagle3", "openvino", windows=False),
}
VARIANTS = ("ttt",)  # of a run that names no variant
TARGETS: dict[str, str] = {}  # no class was published
FAMILIES = families.FAMILIES  # only hidden states are read, and every family has them
WHY_THESE = ""
ARCHITECTURE = "LlamaForCausalLMEagle3"
PUBLISHED = "Eagle3"  # LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, Eagle3Speculator, Eagle3DraftModel
COUNTS = {"outside_vocabulary": "no loss: the target prefers a token outside the draft vocabulary"}
AUXILIARY = 3  # hidden states of the target that a draft reads; engines accept no other number
NORMS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
# Defines the draft: its recipe and its folder must agree in these keys, which the tensors' shapes do not all show.
SAME = ("recipe.method", ("layers", "vocabulary", *NORMS, "sliding_window", *layer_shape.SHAPE))
STARTS = ("random", "identity")
MOST_STEPS = 64  # in a chain
Steps = Annotated[Whole, Field(ge=1, le=MOST_STEPS)]
Decay = Annotated[Number, Field(ge=0.01, le=1)]


@dataclass
class Method(layer_shape.LayerShape):
    """The section `recipe.method`: what the draft is. Its shape is the target's where a key is null."""

    name: Annotated[Text, means("the method, a file of config/method/")] = NAME
    vocabulary: layer_shape.Vocabulary = 8192
    fc_norm: Annotated[Flag, means("whether each auxiliary hidden state is normed before the projection (EAGLE-3.1)")] = False
    norm_output: Annotated[Flag, means("whether what the draft feeds back is normed (EAGLE-3.1)")] = False
    norm_before_residual: Annotated[Flag, means("whether the layer adds to the normed feature, in place of the feature")] = (
        field(default=False, metadata=LATER)
    )
    norm_before_fc: Annotated[Flag, means("whether one norm covers all auxiliary states side by side")] = field(
        default=False, metadata=LATER
    )


@dataclass
class Draft(Known):
    """The section `recipe.draft`, the variant: how it is trained (training-time test, EAGLE-3 section 3.2)."""

    steps: Annotated[
        Steps, means("the number of steps of a chain, each fed with the draft's own hidden state of the one before")
    ] = 7
    decay: Annotated[Decay, means("the weight of each step of a chain, as a share of the one before")] = 0.8
    start: Annotated[
        str, words(*STARTS), means("what an untrained layer is: random, or one that hands its last input through")
    ] = field(default="random", metadata=LATER | {"stored": False})
    loss: Annotated[
        str,
        words(SOFT, TV, LK),
        means("how the target's distribution is learnt: by cross entropy, total variation or LK's hybrid"),
    ] = field(default=SOFT, metadata=LATER | {"stored": False})


def implied(tokens: int) -> dict[str, Any]:
    """Return keys of recipe.method that follow from a target of so many tokens: a vocabulary like that of published drafts."""
    return {"vocabulary": 32000 if tokens >= 64000 else 8192 if tokens > 16384 else None}


@dataclass(kw_only=True)
class Settings(layer_shape.LayerSettings, Method, Draft):
    """Hold the settings that METHOD's answers depend on."""

    first: ClassVar[int] = 0
    count: ClassVar[int | None] = AUXILIARY


def of(recipe: Any, vocabulary: DraftVocabulary | None = None) -> Settings:
    """Return the settings for training and decoding, from a typed recipe and its draft vocabulary."""
    return layer_shape.layer_settings(Settings, recipe, vocabulary)


def check(recipe: Any) -> None:
    """Check recipe.method and recipe.draft. Raises ValueError with the key and what is allowed."""
    method, draft = recipe.method, recipe.draft
    layer_shape.check_layers("layers", method.layers, Settings.first, AUXILIARY)
    layer_shape.check_method(method)
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


def fits(recipe: Any, layers: int, vocabulary: int) -> None:
    """Raise ValueError if the target lacks a layer that is read, or has no more tokens than the draft vocabulary."""
    layer_shape.layers_of(recipe.method.layers, layers, Settings.first)
    layer_shape.check_proposed(recipe.method, vocabulary)


# Layout of another program than vLLM -> the program's name, and the norms that it cannot represent.
LAYOUTS = {
    "gguf": ("llama.cpp", ("fc_norm", "norm_output")),
    "openvino": ("OpenVINO", ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")),
}


def check_layout(layout: str, method: Mapping[str, Any], context: int | None) -> None:
    """Raise ValueError, with the key, for values a layout cannot represent; no layout of LAYOUTS can represent windows."""
    if layout not in LAYOUTS:
        return
    program, norms = LAYOUTS[layout]
    window, layers, other = method["sliding_window"], method["layers"], "or serve this draft by vLLM"
    for name in norms:
        if method[name]:
            raise ValueError(f"recipe.method.{name}: true: {program} has no place for it; train with false, {other}")
    if layout == "openvino" and layers is not None and 0 in layers:
        told = "OpenVINO reads outputs of layers, and layer 0's input is none; train with layers from 1 on"
        raise ValueError(f"recipe.method.layers: {list(layers)}: {told}, {other}")
    if window is not None and (context is None or window < context):
        texts = "texts of any length" if context is None else f"{context} tokens"
        raise ValueError(
            f"recipe.method.sliding_window: {window}: drafts see all of a text in {program}, here {texts}; keep to texts of "
            f"{window} tokens (of an evaluation evaluation.tasks, of an export --context), train with null, {other}"
        )


def stored(recipe: Any) -> str:
    """Return a word for the stored inputs of the auxiliary layers and for what the labels are made of."""
    return layer_shape.stored_word(recipe, recipe.method.layers, is_soft=True)


def told(recipe: Any) -> list[layer_shape.Row]:
    """Return a report's rows: the layers that are read, the draft vocabulary, and the chain that is trained."""
    chain = f"{recipe.draft.steps} steps, weighted {recipe.draft.decay:g}^i"
    rows: list[Any] = [(("draft.steps", "draft.decay"), "chain", chain), (("draft.loss",), "loss", recipe.draft.loss)]
    return layer_shape.told_of_layers(recipe.method, rows, NORMS[2:])  # drafts from elsewhere have other norms


def soft_labels(recipe: Any) -> bool:
    """Return True: the target's distribution over the draft vocabulary is learnt."""
    return True


def loss_weight(recipe: Any) -> float | None:
    """Return the sum of the weights of a chain's steps; None if the loss is no cross entropy."""
    if recipe.draft.loss != SOFT:
        return None
    return float(sum(recipe.draft.decay**step for step in range(recipe.draft.steps)))
