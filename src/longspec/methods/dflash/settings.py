"""Define a DFlash draft's settings in a recipe (arXiv 2602.06036), and check them against its target.

Imports no torch: runs are planned with it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from longspec import families
from longspec.config.schema import HARD, LK, OFFLINE, SOFT, TV, Known
from longspec.config.typed import Flag, Number, Text, Tokens, Whole, means, words
from longspec.draft_vocabulary import DraftVocabulary
from longspec.engines import LLAMA_CPP, VLLM, Served
from longspec.methods import layer_shape

NAME = "dflash"
NAMELESS_FILES = False
SERVED = {VLLM: Served("dflash"), LLAMA_CPP: Served("draft-dflash", "gguf")}
VARIANTS = ("blocks",)  # of a run that names no variant
TARGETS: dict[str, str] = {}  # no class was published
FAMILIES = families.FAMILIES  # only hidden states are read, and every family has them
WHY_THESE = ""
ARCHITECTURE = "DFlashDraftModel"
PUBLISHED = "DFlash"  # DFlashDraftModel, DFlashSpeculator
COUNTS = {
    "blocks": "blocks drafted",
    "leading_hits": "drafted tokens that are the text's, up to each block's first other one",
    "outside_vocabulary": "no loss: the token to learn lies outside the draft vocabulary",
}
MOST_LAYERS = 8  # in a draft
# Defines the draft: its recipe and its folder must agree in these keys, which the tensors' shapes do not all show.
OWN = ("depth", "block_size", "mask_token", "tied_k_norm", "sliding_window")
SAME = ("recipe.method", ("layers", "vocabulary", *OWN, *layer_shape.SHAPE))
DECAY, D_PACE = "decay", "d_pace"
Depth = Annotated[Whole, Field(ge=1, le=MOST_LAYERS)]
BlockSize = Annotated[Whole, Field(ge=2, le=64)]
TokenId = Annotated[Whole, Field(ge=0, le=2**24)]
Gamma = Annotated[Number, Field(ge=0.1, le=1000)]
Alpha = Annotated[Number, Field(gt=0, le=1)]


@dataclass
class Method(layer_shape.LayerShape):
    """The section `recipe.method`: what the draft is. Its shape is the target's where a key is null."""

    name: Annotated[Text, means("the method, a file of config/method/")] = NAME
    depth: Annotated[Depth, means("the number of the draft's decoder layers")] = 3
    stored_layers: Annotated[
        list[Whole] | None,
        means(
            "the layers whose inputs are stored where recipe.states.source is offline, such as those of an EAGLE-3 run whose "
            "states are shared; null: those that are read"
        ),
    ] = field(default=None, metadata={"stored": False})
    block_size: Annotated[BlockSize, means("the slots of a block: the newest token and the tokens drafted at once")] = 16
    mask_token: Annotated[
        TokenId | None,
        means("the token that stands in the slots to be filled, one that texts do not have; null: the target's last"),
    ] = None
    vocabulary: Annotated[
        Tokens | None,
        means("the number of tokens that the draft can propose by a head of its own; null: all, by the target's head"),
    ] = None
    sliding_window: Annotated[
        Tokens | None,
        means("the number of keys that a slot sees, its own and none of later slots among them; null: all, the whole block"),
    ] = None
    tied_k_norm: Annotated[
        Flag, means("whether all layers share one norm of keys: vLLM 0.32 takes the first layer's for all layers' keys on CPUs")
    ] = True


@dataclass
class Draft(Known):
    """The section `recipe.draft`, the variant: how it is trained."""

    anchors: Annotated[
        Tokens | None,
        means("the number of blocks of a row in a step, drawn anew each time; null: the row's tokens / block_size"),
    ] = field(default=None, metadata={"stored": False})
    loss: Annotated[
        str,
        words(HARD, SOFT, TV, LK),
        means(
            "what is learnt: the text's tokens, or the target's distribution, by cross entropy, total variation or LK's hybrid"
        ),
    ] = SOFT
    weights: Annotated[
        str, words(DECAY, D_PACE), means("the weights of a block's slots: exp(-(k - 1) / gamma) of slot k, or D-PACE's")
    ] = DECAY
    gamma: Annotated[Gamma, means("how slowly weights fall; published: 7, 5 and 4 for blocks of 16, 10 and 8")] = 7.0
    alpha: Annotated[Alpha, means("the smoothing of the draft's probabilities in D-PACE's weights (arXiv 2605.18810)")] = 0.5


@dataclass(kw_only=True)
class Settings(layer_shape.LayerSettings, Method, Draft):
    """Hold the settings that METHOD's answers depend on."""

    row_tokens: int = field(default=0, metadata={"stored": False})  # of a row in training; 0: no training

    @property
    def predicted(self) -> int:
        """Return the number of tokens that a block drafts."""
        return self.block_size - 1


def of(recipe: Any, vocabulary: DraftVocabulary | None = None) -> Settings:
    """Return the settings for training and decoding, from a typed recipe and its draft vocabulary."""
    stored_layers = recipe.method.stored_layers if recipe.states.source == OFFLINE else None
    more = {"row_tokens": recipe.data.sequence_length, "stored_layers": stored_layers and list(stored_layers)}
    return layer_shape.layer_settings(Settings, recipe, vocabulary, **more)


def longest_chain(recipe: Any) -> int:
    """Return the number of tokens that a block drafts."""
    return int(recipe.method.block_size) - 1


def anchors_of(settings: Settings, row_tokens: int) -> int:
    """Return the most blocks that a row of `row_tokens` tokens has in a step."""
    return min(settings.anchors or max(1, row_tokens // settings.block_size), row_tokens)


def check(recipe: Any) -> None:
    """Check recipe.method and recipe.draft. Raises ValueError with the key and what is allowed."""
    method = recipe.method
    layer_shape.check_layers("layers", method.layers, Settings.first)
    layer_shape.check_layers("stored_layers", method.stored_layers, 0)
    missing = sorted(set(method.layers or ()) - set(method.stored_layers or method.layers or ()))
    if method.stored_layers is not None and (method.layers is None or missing):
        raise ValueError(
            f"recipe.method.stored_layers: {list(method.stored_layers)}: must hold all of recipe.method.layers, which are "
            f"{'not given' if method.layers is None else list(method.layers)}"
        )
    layer_shape.check_method(method)
    if method.block_size > recipe.data.sequence_length:
        raise ValueError(
            f"recipe.method.block_size: blocks of {method.block_size} find no place in rows of {recipe.data.sequence_length} "
            "tokens (recipe.data.sequence_length)"
        )
    if method.sliding_window is not None and method.sliding_window <= method.block_size:
        raise ValueError(
            f"recipe.method.sliding_window: {method.sliding_window} keys hide the text from the last of {method.block_size} "
            f"slots (recipe.method.block_size); give {method.block_size + 1} or more"
        )


def mask_token_of(mask_token: int | None, vocabulary: int, key: str = "recipe.method.mask_token") -> int:
    """Return the token that fills the slots. Raises ValueError, which names the key, if the target does not have it."""
    if mask_token is not None and mask_token >= vocabulary:
        raise ValueError(f"{key}: {mask_token}: the target has tokens 0 to {vocabulary - 1}")
    return vocabulary - 1 if mask_token is None else mask_token


def fits(recipe: Any, layers: int, vocabulary: int) -> None:
    """Raise ValueError if the target lacks a layer that is read or the mask token, or has too few tokens."""
    method = recipe.method
    for chosen in (method.layers, method.stored_layers or method.layers):
        layer_shape.layers_of(chosen, layers, Settings.first)
    mask_token_of(method.mask_token, vocabulary)
    layer_shape.check_proposed(method, vocabulary)


def stored(recipe: Any) -> str:
    """Return a word for the stored inputs of layers and soft labels; EAGLE-3 drafts that read the same have the same word."""
    method = recipe.method
    return layer_shape.stored_word(recipe, method.stored_layers or method.layers, is_soft=soft_labels(recipe))


def told(recipe: Any) -> list[layer_shape.Row]:
    """Return a report's rows: the layers that are read, the block, and what its slots learn."""
    method, draft = recipe.method, recipe.draft
    weights = f"exp(-(k - 1) / {draft.gamma:g})" if draft.weights == DECAY else f"D-PACE, alpha {draft.alpha:g}"
    blocks = "one for each block of its tokens" if draft.anchors is None else str(draft.anchors)
    further: list[layer_shape.Row] = [
        (("method.depth", "method.tied_k_norm"), "decoder layers", str(method.depth)),
        (("method.block_size", "method.mask_token", "draft.anchors"), "block", f"{method.block_size} slots, of a row {blocks}"),
        (("draft.loss",), "loss", draft.loss),
        (("draft.weights", "draft.gamma", "draft.alpha"), "weight of slot k", weights),
    ]
    return layer_shape.told_of_layers(method, further)


def soft_labels(recipe: Any) -> bool:
    """Tell whether the target's distribution is learnt."""
    return bool(recipe.draft.loss != HARD)


def loss_weight(recipe: Any) -> float | None:
    """Return 1, the sum of a block's fixed weights; None for D-PACE, whose weights depend on the draft, and for tv and lk."""
    return None if recipe.draft.weights == D_PACE or recipe.draft.loss in (TV, LK) else 1.0
