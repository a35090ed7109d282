"""Drafts that other trainers published: names of tensors, embeddings, draft vocabulary and shape, read into the house's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.distributed import log
from longspec.methods.layer_config import layer_config
from longspec.methods.layer_shape import ROPE, SHAPE, LayerSettings, check_shape, check_values
from longspec.methods.vocabulary_tensors import D2T, T2D, ids_of
from longspec.models.target import head_width

OF_CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
# Of the target, or computed: nothing that a draft of ours holds.
NOT_THE_DRAFTS = ("verifier_norm.weight", "verifier_lm_head.weight")
INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
ELSEWHERE = "correct a copy of the folder, or take another draft"


def strange_fields(found: dict[str, Any], represented: dict[str, tuple[Any, ...]], published: Any, target: Any) -> list[str]:
    """Return what is wrong with fields of a published draft for this target.

    represented: fields that may not be others than these, a missing one among them; published, target: transformers'
    configurations.
    """
    faults = [
        f"{name}: is {found[name]!r}, a draft of ours has {' or '.join(map(repr, values[1:])) or 'none'}"
        for name, values in represented.items()
        if found.get(name) not in values
    ]
    faults += [
        f"{name}: {published.rope_parameters[name]!r} in the rotation, a draft of ours turns whole heads by positions alone"
        for name in ("mrope_section", "partial_rotary_factor")
        if published.rope_parameters.get(name) not in (None, 1, 1.0)
    ]
    width = found.get("target_hidden_size")
    for name, own, wanted in (
        ("hidden_size", published.hidden_size, target.hidden_size),
        ("target_hidden_size", target.hidden_size if width is None else width, target.hidden_size),
        ("vocab_size", published.vocab_size, target.vocab_size),
        ("hidden_act", published.hidden_act, target.hidden_act),
    ):
        if own != wanted:
            faults.append(f"{name}: is {own!r}, the target has {wanted!r}")
    return faults


def warn_of_positions(published: Any, target: Any, file: Path) -> None:
    """Warn where a draft was made for shorter texts than its target."""
    own, wanted = published.max_position_embeddings, target.max_position_embeddings
    if own < wanted:
        log(
            f"warning: {file}: max_position_embeddings: is {own}, the target has {wanted}: it was hardly trained on longer "
            f"texts, and its acceptance falls beyond {own} tokens; train it on rows that are as long as the texts to be drafted"
        )


def own_names(found: dict[str, Tensor], folder: Path, rename: tuple[str, str] | None = None) -> dict[str, Tensor]:
    """Tensors by our names; rename: a beginning of names, and ours. Raises ValueError for two of one name."""
    own: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = name.removeprefix("model.")
        if plain in NOT_THE_DRAFTS or plain.endswith(INVERSE_FREQUENCIES):
            log(f"{folder}: {name}: left out, it is the target's or follows from {ROPE}")
            continue
        if rename is not None and plain.startswith(rename[0]):
            plain = plain.replace(*rename, 1)
        if plain in own:
            raise ValueError(f"{folder}: {name}: there are two tensors of this name, with and without a prefix; {ELSEWHERE}")
        own[plain] = tensor
    biases = [name for name in own if name.endswith(".bias")]
    if biases:
        raise ValueError(f"{folder}: {', '.join(biases)}: our layer has no biases; take another draft")
    return own


def check_embeddings(found: Tensor | None, embeddings: Callable[[], Tensor], folder: Path) -> None:
    """Raise ValueError for embeddings other than the target's, but for the rounding of their type."""
    if found is None:
        return
    target = embeddings()
    same = found.shape == target.shape and (
        torch.equal(target.to(found.dtype), found) or torch.equal(found.to(target.dtype), target)
    )
    if not same:
        differing = "shapes" if found.shape != target.shape else f"{int((found != target).any(1).sum())} of its rows"
        raise ValueError(
            f"{folder}: {EMBEDDINGS}: differs from the target's in {differing}; our drafts share the target's embeddings. Give "
            "the target that the draft was trained for; a draft that trained embeddings of its own cannot be represented"
        )
    log(f"{folder}: {EMBEDDINGS}: left out, it is the target's own")


def vocabulary_of(
    state: dict[str, Tensor], told: int | None, tokens: int, folder: Path
) -> tuple[int | None, tuple[int, ...] | None]:
    """Return how many tokens a head proposes, and which; None and None: all. Both of the vocabulary's tensors leave `state`."""
    proposed = len(state[HEAD])
    if told not in (None, proposed):
        raise ValueError(f"{folder}: draft_vocab_size: is {told}, {HEAD} has {proposed} rows; {ELSEWHERE}")
    own = {name: state.pop(name) for name in (D2T, T2D) if name in state}
    if proposed == tokens:
        if D2T in own and bool(own[D2T].any()):
            raise ValueError(f"{folder}: {D2T}: moves tokens, though all {tokens} are proposed; {ELSEWHERE}")
        return None, None
    if D2T not in own:
        raise ValueError(f"{folder}: {D2T}: is missing, {HEAD} has {proposed} of the target's {tokens} tokens; {ELSEWHERE}")
    own[D2T] = own[D2T].to(torch.int64)
    return proposed, ids_of(own, proposed, tokens, folder, ELSEWHERE)


def own_shape(published: Any, target: Any, schema: type[LayerSettings], file: Path) -> dict[str, Any]:
    """Return the parts of a published draft's shape that are not the target's; both are transformers' configurations."""
    rope = {name: value for name, value in published.rope_parameters.items() if name != "type" and value is not None}
    if rope["rope_type"] == "yarn":  # else stretched by however many positions the target has
        rope.setdefault("original_max_position_embeddings", published.max_position_embeddings)
    own = {name: getattr(published, name) for name in SHAPE} | {ROPE: rope}
    check_values(schema, own, str(file), ELSEWHERE)
    check_shape(own, str(file))
    default = layer_config(target, schema())
    beside = {name: getattr(default, name) for name in SHAPE if name != "head_dim"} | {"head_dim": head_width(target)}
    beside[ROPE] = {name: value for name, value in dict(target.rope_parameters).items() if value is not None}
    return {name: value for name, value in own.items() if value != beside[name]}
