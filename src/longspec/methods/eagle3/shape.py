"""What the layer of a draft can be beside its target: the layers that it reads, its heads, and its rotations by the keys that
transformers reads (modeling_rope_utils). No torch: runs are planned with it.
"""

from collections.abc import Mapping
from typing import Any

from longspec.families import ROPE_TYPES

AUXILIARY = 3  # hidden states of the target that a draft reads; engines know no other number
FEWEST_LAYERS = 7  # of a target: with fewer, two of the default layers 2, L // 2 and L - 3 are the same one
ROPE = "rope_parameters"
SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", ROPE)

TYPE, PARTIAL, TRUNCATE = "rope_type", "partial_rotary_factor", "truncate"
THETA, ORIGINAL = "rope_theta", "original_max_position_embeddings"
LARGEST = 10**12
# By type: the numbers that it needs, and what it may have.
NEEDED = {
    "default": (THETA,),
    "linear": (THETA, "factor"),
    "llama3": (THETA, "factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (THETA, "factor", ORIGINAL),
}
MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # for none
ALLOWED = {"yarn": ("attention_factor", "beta_fast", "beta_slow", *MAY_BE_ZERO, TRUNCATE)}


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


def check_shape(shape: Mapping[str, Any], section: str) -> None:
    """Raise ValueError, with the key, for parts of a layer's shape that no layer has."""
    heads, key_values, width, rope = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", ROPE))
    if width is not None and width % 2:
        raise ValueError(f"{section}.head_dim: {width}: must be even, rotations turn pairs")
    if heads is not None and key_values is not None and heads % key_values:
        raise ValueError(f"{section}.num_key_value_heads: {key_values} do not divide the {heads} of num_attention_heads")
    if rope is not None:
        check_rope(rope, f"{section}.{ROPE}")


def ffn_width(target: Any) -> int:
    """Feed-forward width of a draft beside a target of this configuration, or of such sizes, where it has none of its own.

    GPT-OSS's `intermediate_size` is that of one expert; the drafts that were published for it have 6 times the hidden width.
    """
    return int(6 * target.hidden_size if target.model_type == "gpt_oss" else target.intermediate_size)


def check_rope(rope: Mapping[str, Any], key: str) -> None:
    """Raise ValueError, with the key, for a rotation that lacks a number, or has one that is none or that nothing reads.

    A value of null stands for a key that is missing.
    """
    given = {name: value for name, value in rope.items() if value is not None}
    kind = given.pop(TYPE, None)
    if kind not in ROPE_TYPES:
        raise ValueError(f"{key}: rope_type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are")
    if given.pop(PARTIAL, 1) != 1:
        raise ValueError(
            f"{key}: {PARTIAL}: is {rope[PARTIAL]!r}: a layer with a rotation of its own turns whole heads; leave the key out, "
            "or all of them for the target's rotation, whatever part of its heads that turns"
        )
    needed = NEEDED[kind]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{key}: {', '.join(missing)}: missing; rope_type {kind} needs {', '.join(needed)}")
    known = (*needed, *ALLOWED.get(kind, ()))
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{key}: {name}: rope_type {kind} has {', '.join(known)} alone; leave it out")
        if name == TRUNCATE and not isinstance(value, bool):
            raise ValueError(f"{key}: {name}: is {value!r}, must be true or false")
        is_number = type(value) in (int, float) and (0 < value <= LARGEST or (value == 0 and name in MAY_BE_ZERO))
        if name != TRUNCATE and not is_number:
            raise ValueError(f"{key}: {name}: is {value!r}, must be a number above 0 to {LARGEST}")
    low, high = (given.get(name, limit) for name, limit in (("low_freq_factor", 0), ("high_freq_factor", 1)))
    if low >= high:
        raise ValueError(f"{key}: high_freq_factor: is {high}, must be above low_freq_factor, {low}")
