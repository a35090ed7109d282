"""Which rotations a draft's layer can have of its own, by the keys that transformers reads (modeling_rope_utils). No torch."""

from collections.abc import Mapping
from typing import Any

from longspec.families import ROPE_TYPES

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
