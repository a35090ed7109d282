"""Define the shape of a draft's own decoder layers, if it is not the target's, for recipes and published drafts.

Imports no torch: runs are planned with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from longspec import families
from longspec.config.faults import faults_of
from longspec.config.schema import LATER, Known
from longspec.config.typed import Rate, Size, Text, Tokens, Whole, means
from longspec.draft_vocabulary import DraftVocabulary

ROPE = "rope_parameters"
SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", ROPE)

PARTIAL, TRUNCATE = "partial_rotary_factor", "truncate"
THETA, ORIGINAL = "rope_theta", "original_max_position_embeddings"
LARGEST = 10**12
# By rope_type: the numbers that it needs, and further ones that it may have.
NEEDED = {
    "default": (THETA,),
    "linear": (THETA, "factor"),
    "llama3": (THETA, "factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (THETA, "factor", ORIGINAL),
}
MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # 0 turns them off
ALLOWED = {"yarn": ("attention_factor", "beta_fast", "beta_slow", *MAY_BE_ZERO, TRUNCATE)}
FEWEST_LAYERS = 7  # of a target: with fewer, two of the default layers 2, L // 2 and L - 3 coincide
Row = tuple[tuple[str, ...], str, str]  # of a report: the recipe's keys that it covers, its title, the value as it acts
HeadWidth = Annotated[Whole, Field(ge=2, le=2**16)]


Vocabulary = Annotated[
    Tokens | None, means("the number of tokens that the draft can propose, the most frequent ones; null: all of the target's")
]


@dataclass
class LayerShape(Known):
    """Keys of `recipe.method` of a draft with decoder layers of its own, which reads inputs of the target's layers.

    Its shape is the target's where a key is null.
    """

    layers: Annotated[
        list[Whole] | None, means("the target's layers whose inputs are read, DFlash's from 1 on; null: 2, L // 2, L - 3")
    ] = None
    vocabulary: Vocabulary = None
    vocabulary_from: Annotated[
        Text | None, means("another run, by name or path, whose vocabulary is taken; null: counted on this run's rows")
    ] = field(default=None, metadata={"stored": False})
    sliding_window: Annotated[
        Tokens | None, means("the number of keys that its self attention sees, the query's own among them; null: all")
    ] = None
    intermediate_size: Annotated[Size | None, means("the width of its feed-forward part; null: the target's")] = field(
        default=None, metadata=LATER
    )
    num_attention_heads: Annotated[Size | None, means("the number of its heads; null: the target's")] = field(
        default=None, metadata=LATER
    )
    num_key_value_heads: Annotated[Size | None, means("the number of heads of keys and values; null: the target's")] = field(
        default=None, metadata=LATER
    )
    head_dim: Annotated[HeadWidth | None, means("a head's width; null: the target's")] = field(default=None, metadata=LATER)
    rms_norm_eps: Annotated[Rate | None, means("the epsilon of its norms; null: the target's")] = field(
        default=None, metadata=LATER
    )
    rope_parameters: Annotated[
        dict[str, Any] | None, means("its own rotation: rope_type, rope_theta, and its scaling; null: the target's")
    ] = field(default=None, metadata=LATER)


@dataclass(kw_only=True)
class LayerSettings(LayerShape):
    """Hold the settings of such a draft: the keys of recipe.method, and its draft vocabulary.

    ids: of the draft vocabulary, from its file; None if the draft proposes all tokens, or if nothing is trained or decoded, as
    in an estimate. target_vocabulary: the number of tokens that these are chosen from.
    """

    first: ClassVar[int] = 1  # the first layer that it can read
    count: ClassVar[int | None] = None  # the number of layers that it reads; None: any
    name: str = field(default="", metadata={"stored": False})
    layers: tuple[Whole, ...] | None = None  # type: ignore[assignment]  # a recipe knows no tuples
    vocabulary: Tokens | None = None
    ids: tuple[int, ...] | None = field(default=None, metadata={"stored": False})
    target_vocabulary: int | None = field(default=None, metadata={"stored": False})

    def read_of(self, target_layers: int) -> tuple[int, ...]:
        """Return the layers of a target of so many whose inputs are read. Raises ValueError as layers_of does."""
        return layers_of(self.layers, target_layers, self.first)


Settings = TypeVar("Settings", bound=LayerSettings)


def layer_settings(schema: type[Settings], recipe: Any, vocabulary: DraftVocabulary | None, **more: Any) -> Settings:
    """Return the settings in a typed recipe, with its draft vocabulary's tokens. more: further settings."""
    known = {each.name for each in fields(schema)}
    given = {name: section[name] for section in (recipe.method, recipe.draft) for name in section if name in known}
    given["layers"] = None if given["layers"] is None else tuple(given["layers"])
    given[ROPE] = None if given[ROPE] is None else dict(given[ROPE])
    if vocabulary is not None:
        given |= {"ids": vocabulary.ids, "target_vocabulary": vocabulary.size}
    return schema(**given | more)


def check_layers(key: str, layers: Sequence[int] | None, first: int, count: int | None = None) -> None:
    """Raise ValueError, with the key, unless layers ascend from `first` on and are `count` (None: any number)."""
    if layers is None:
        return
    if list(layers) != sorted(set(layers)) or not layers or layers[0] < first or len(layers) != (count or len(layers)):
        raise ValueError(
            f"recipe.method.{key}: {list(layers)}: must be {f'{count} ' if count else ''}layers from {first} on in ascending "
            "order, each once, as [2, 16, 29]"
        )


def check_method(method: Any) -> None:
    """Raise ValueError, with the key, for keys of recipe.method that contradict each other."""
    if method.vocabulary_from is not None and method.vocabulary is None:
        raise ValueError("recipe.method.vocabulary_from: recipe.method.vocabulary is null, all tokens are proposed; give both")
    check_shape({name: method[name] for name in SHAPE}, "recipe.method.")


def check_proposed(method: Any, tokens: int) -> None:
    """Raise ValueError, with the key, if a draft vocabulary is not smaller than the target's `tokens` tokens."""
    if method.vocabulary is not None and method.vocabulary >= tokens:
        raise ValueError(f"recipe.method.vocabulary: {method.vocabulary}: the target has {tokens} tokens; give fewer, or null")


def layers_of(layers: Sequence[int] | None, target_layers: int, first: int) -> tuple[int, ...]:
    """Return the layers whose inputs are read, of a target with so many layers: the given ones, or 2, L // 2 and L - 3.

    first: the first layer that a draft can read. Raises ValueError, with the key, if the target lacks a layer.
    """
    if layers is None and target_layers < FEWEST_LAYERS:
        raise ValueError(
            f"recipe.method.layers: must be given for a target of {target_layers} layers, such as "
            f"{sorted({first, target_layers // 2, target_layers - 1})}: the default 2, L // 2 and L - 3 needs {FEWEST_LAYERS} "
            "layers"
        )
    chosen = tuple(layers or (2, target_layers // 2, target_layers - 3))
    if chosen[-1] >= target_layers:
        raise ValueError(f"recipe.method.layers: {list(chosen)}: the target has layers 0 to {target_layers - 1}")
    return chosen


def stored_word(recipe: Any, layers: Sequence[int] | None, *, is_soft: bool) -> str:
    """Return a word for inputs of these layers and what soft labels are made of; drafts that read the same share it."""
    labels = "-final" if recipe.states.top_k is None else f"-top{recipe.states.top_k}"
    return f"hidden-{'default' if layers is None else '-'.join(map(str, layers))}{labels if is_soft else ''}"


def told_of_layers(method: Any, further: list[Row], switches: Sequence[str] = ()) -> list[Row]:
    """Return a report's rows for LayerShape's keys, with a method's further rows between them.

    switches: further keys of recipe.method, reported if they are not at their defaults.
    """
    layers = "2, L // 2, L - 3" if method.layers is None else ", ".join(map(str, method.layers))
    size = "all of the target's" if method.vocabulary is None else f"{method.vocabulary:,}"
    lender = "" if method.vocabulary_from is None else f", of {method.vocabulary_from}"
    own = {name: method[name] for name in (*switches, *SHAPE) if method[name] not in (None, False)}
    words = ", ".join(name if value is True else f"{name} {value}" for name, value in own.items())
    return [
        (("method.layers", "method.stored_layers"), "layers read", layers),
        (("method.vocabulary", "method.vocabulary_from"), "draft vocabulary, tokens", f"{size}{lender}"),
        *further,
        (("method.sliding_window",), "attention window, tokens", str(method.sliding_window or "none")),
        *([(tuple(f"method.{name}" for name in own), "of its own", words)] if own else []),
    ]


def check_shape(shape: Mapping[str, Any], place: str) -> None:
    """Raise ValueError, beginning with place (`recipe.method.`) and key, for a shape that no layer can have."""
    heads, key_values, width, rope = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", ROPE))
    if width is not None and width % 2:
        raise ValueError(f"{place}head_dim: {width}: must be even, rotations turn pairs")
    if heads is not None and key_values is not None and heads % key_values:
        raise ValueError(f"{place}num_key_value_heads: {key_values} do not divide the {heads} of num_attention_heads")
    if rope is not None:
        check_rope(rope, f"{place}{ROPE}")


def ffn_width(target: Any) -> int:
    """Return the feed-forward width of a draft for a target of this configuration, or of such sizes, if it sets none.

    GPT-OSS's `intermediate_size` is that of one expert; published drafts for it have 6 times the hidden width.
    """
    return int(6 * target.hidden_size if target.model_type == "gpt_oss" else target.intermediate_size)


def check_rope(rope: Mapping[str, Any], key: str) -> None:
    """Raise ValueError, with the key, for a rotation that lacks a number, or has an invalid or unknown one.

    A value of null counts as a missing key.
    """
    given = {name: value for name, value in rope.items() if value is not None}
    kind = given.pop("rope_type", None)
    if kind not in families.ROPE_TYPES:
        raise ValueError(f"{key}: rope_type {kind!r} is not supported; {', '.join(families.ROPE_TYPES)} are")
    if given.get(PARTIAL) == 1:  # 1 is the default: whole heads turn
        del given[PARTIAL]
    needed = NEEDED[kind]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{key}: {', '.join(missing)}: missing; rope_type {kind} needs {', '.join(needed)}")
    known = (*needed, *ALLOWED.get(kind, ()))
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{key}: {name}: rope_type {kind} has {', '.join(known)} alone; leave it out")
        is_number = type(value) in (int, float) and (0 < value <= LARGEST or (value == 0 and name in MAY_BE_ZERO))
        if not is_number and (name, type(value)) != (TRUNCATE, bool):
            raise ValueError(f"{key}: {name}: is {value!r}, must be a number above 0 to {LARGEST}")


def check_values(schema: Any, values: Mapping[str, Any], section: str, advice: str) -> None:
    """Raise ValueError, with the key and the advice, for a file's value that is invalid or out of range."""
    known = {name: value for name, value in values.items() if name != "ids"}
    for fault in faults_of(schema, known):
        raise ValueError(f"{section}: {fault}; {advice}")
