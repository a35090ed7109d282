"""EAGLE-3 drafts that other trainers published, read into the house's own tensors and settings.

Two layouts. That of the engines (SGLang's trainer, AngelSlim, the authors of EAGLE-3): `midlayer.*` and a config.json whose
fields are the layer's. That of the package `speculators`: `layers.0.*`, and the layer's fields in `transformer_layer_config`.
Fields that are left out have LlamaConfig's defaults, as both engines take them: so most drafts for Llama-3.1 turn by a
rope_theta of 10,000, which is not their target's. What each field means to which engine: layer.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from longspec.distributed import log
from longspec.methods.eagle3.settings import AUXILIARY, MOST_STEPS, NORMS, Settings, layers_of
from longspec.methods.layer_config import layer_config
from longspec.methods.layer_shape import ROPE, SHAPE, check_shape, check_values
from longspec.methods.vocabulary_tensors import D2T, T2D, ids_of
from longspec.models.target import head_width
from longspec.models.weight_files import read_folder, telling_damage

OF_LLAMA = (
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
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SLIDING, FULL = "sliding_attention", "full_attention"
# Field of the layer or of the draft -> its values that mean what our layer computes, a missing one among them.
REPRESENTED: dict[str, tuple[Any, ...]] = {
    "model_type": (None, "llama"),
    "num_hidden_layers": (None, 1),
    "attention_bias": (None, False),
    "qkv_bias": (None, False),
    "mlp_bias": (None, False),
    "bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "logit_scale": (None, 1, 1.0),
    "num_aux_hidden_states": (None, AUXILIARY),
    "parallel_drafting": (None, False),
    "pard_token": (None,),
    "mask_token_id": (None,),
}


def check_represented(config: dict[str, Any], layer: dict[str, Any], llama: LlamaConfig, target: Any, file: Path) -> None:
    """Raise ValueError, with file, field and both values, for what our layer beside this target cannot be.

    layer: the fields of the layer in config; llama: what LlamaConfig makes of them; target: the target's configuration.
    """
    found = {name: value for name, value in config.items() if name != "model_type"} | layer
    faults = [
        f"{name}: is {found[name]!r}, a draft of ours has {' or '.join(map(repr, values[1:])) or 'none'}"
        for name, values in REPRESENTED.items()
        if found.get(name) not in values
    ]
    if (types := found.get("layer_types") or [FULL])[0] not in (SLIDING, FULL):
        faults.append(f"layer_types: is {types!r}, must be a list of {SLIDING} or {FULL}")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        faults.append("eagle_config.use_aux_hidden_state: is False, a draft of ours reads the target's auxiliary states")
    faults += [
        f"{name}: {llama.rope_parameters[name]!r} in the rotation, a draft of ours turns whole heads by their positions alone"
        for name in ("mrope_section", "partial_rotary_factor")
        if llama.rope_parameters.get(name) not in (None, 1, 1.0)
    ]
    width = found.get("target_hidden_size")
    for name, own, wanted in (
        ("hidden_size", llama.hidden_size, target.hidden_size),
        ("target_hidden_size", target.hidden_size if width is None else width, target.hidden_size),
        ("vocab_size", llama.vocab_size, target.vocab_size),
        ("hidden_act", llama.hidden_act, target.hidden_act),
    ):
        if own != wanted:
            faults.append(f"{name}: is {own!r}, the target has {wanted!r}")
    if faults:
        raise ValueError(f"{file}: {'; '.join(faults)}; give the target it was trained for, or take another draft")


EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
# Of the target, or computed: nothing that a draft of ours holds.
NOT_THE_DRAFTS = ("verifier_norm.weight", "verifier_lm_head.weight")
INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
ELSEWHERE = "correct a copy of the folder, or take another draft"


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor], layers: tuple[int, ...] | None
) -> tuple[dict[str, Tensor], Settings]:
    """The state dict of our layer, and its settings, of a published draft for a target of this configuration.

    config: of its config.json; embeddings: reads the target's, [T, H]; layers: of the target, whose inputs the draft reads, for
    folders that do not say it beyond doubt. Raises ValueError with file, key and both values for what we cannot represent.
    """
    file = folder / "config.json"
    of_speculators = "speculators_model_type" in config
    with telling_damage(file, "is no configuration of a draft"):
        layer = config["transformer_layer_config"] if of_speculators else config
        llama = LlamaConfig(**{name: layer[name] for name in OF_LLAMA if layer.get(name) is not None})
        eagle = config.get("eagle_config") or {}
        slides = (layer.get("layer_types") or [FULL])[0] == SLIDING
        proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        steps = proposals[0].get("speculative_tokens")
    check_represented(config, layer, llama, target, file)
    if isinstance(steps, int) and steps > MOST_STEPS:
        log(f"{file}: speculative_tokens: is {steps}; taken for {MOST_STEPS}, the longest chain that is trained")
        steps = MOST_STEPS
    flags = {name: config.get(name) for name in NORMS}
    flags["norm_before_fc"] = eagle.get("norm_before_fc", flags["norm_before_fc"])
    if flags["norm_before_residual"] is None and of_speculators:
        log(f"{file}: norm_before_residual: missing; taken for true, as vLLM does in this layout")
        flags["norm_before_residual"] = True
    state = _own_names(read_folder(folder), folder)
    _check_embeddings(state.pop(EMBEDDINGS, None), embeddings, folder)
    vocabulary, ids = _vocabulary(state, config.get("draft_vocab_size"), target.vocab_size, folder)
    values = {
        "layers": _layers(config.get(LAYER_IDS), eagle.get(LAYER_IDS), layers, target.num_hidden_layers, file),
        "vocabulary": vocabulary,
        "sliding_window": layer.get("sliding_window") if slides else None,
        **{name: False if value is None else value for name, value in flags.items()},
        **_shape(llama, target, file),
        "steps": Settings().steps if steps is None else steps,
        "target_vocabulary": None if ids is None else target.vocab_size,
    }
    check_values(Settings, values, str(file), ELSEWHERE)
    own, wanted = llama.max_position_embeddings, target.max_position_embeddings
    if own < wanted:
        log(
            f"warning: {file}: max_position_embeddings: is {own}, the target has {wanted}: it was hardly trained on longer "
            f"texts, and its acceptance falls beyond {own} tokens; train it on rows that are as long as the texts to be drafted"
        )
    return state, Settings(**values, ids=ids)


def _own_names(found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Tensors by our names. Raises ValueError for two of one name."""
    own: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = name.removeprefix("model.")
        if plain in NOT_THE_DRAFTS or plain.endswith(INVERSE_FREQUENCIES):
            log(f"{folder}: {name}: left out, it is the target's or follows from {ROPE}")
            continue
        plain = plain.replace("layers.0.", "midlayer.", 1) if plain.startswith("layers.0.") else plain
        if plain in own:
            raise ValueError(f"{folder}: {name}: there are two tensors of this name, with and without a prefix; {ELSEWHERE}")
        own[plain] = tensor
    biases = [name for name in own if name.endswith(".bias")]
    if biases:
        raise ValueError(f"{folder}: {', '.join(biases)}: our layer has no biases; take another draft")
    return own


def _check_embeddings(found: Tensor | None, embeddings: Callable[[], Tensor], folder: Path) -> None:
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


def _vocabulary(
    state: dict[str, Tensor], told: int | None, tokens: int, folder: Path
) -> tuple[int | None, tuple[int, ...] | None]:
    """How many tokens the draft proposes, and which; None and None: all. Both of the vocabulary's tensors leave `state`."""
    if HEAD not in state:
        raise ValueError(f"{folder}: {HEAD}: is missing; a draft that takes the target's head cannot be represented")
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


def _layers(
    inputs: list[int] | None, outputs: list[int] | None, given: tuple[int, ...] | None, target_layers: int, file: Path
) -> tuple[int, ...]:
    """The auxiliary layers, counted by their inputs, from what config.json says, by inputs or by outputs, or the user.

    Raises ValueError for others than three ascending ones of the target's.
    """
    for found in (inputs, outputs):
        check_values(Settings, {"layers": found}, f"{file}: {LAYER_IDS}", ELSEWHERE)
    if inputs and given not in (None, tuple(inputs)):
        raise ValueError(f"--layers: {list(given or ())}: {file} says {inputs}; leave it out")
    if given or inputs:
        chosen = given or tuple(inputs or ())
    elif outputs:
        chosen = tuple(layer + 1 for layer in outputs)
        log(
            f"{file}: eagle_config.{LAYER_IDS}: taken for outputs, as SGLang does: inputs of layers {list(chosen)}. vLLM takes "
            f"them for inputs; where the draft was trained so, give --layers {' '.join(map(str, outputs))}"
        )
    else:
        chosen = layers_of(None, target_layers)
        log(f"{file}: {LAYER_IDS}: missing; engines' default {list(chosen)} is taken")
    if len(chosen) != AUXILIARY or list(chosen) != sorted({each for each in chosen if each in range(target_layers)}):
        raise ValueError(
            f"{file}: {LAYER_IDS}: {list(chosen)}: must be {AUXILIARY} of the target's layers 0 to {target_layers - 1}, "
            f"ascending; {ELSEWHERE}"
        )
    return chosen


def _shape(llama: LlamaConfig, target: Any, file: Path) -> dict[str, Any]:
    """The parts of the layer's shape that are not the target's."""
    rope = {name: value for name, value in llama.rope_parameters.items() if name != "type" and value is not None}
    if rope["rope_type"] == "yarn":  # else stretched by however many positions the target has
        rope.setdefault("original_max_position_embeddings", llama.max_position_embeddings)
    own = {name: getattr(llama, name) for name in SHAPE} | {ROPE: rope}
    check_values(Settings, own, str(file), ELSEWHERE)
    check_shape(own, str(file))
    default = layer_config(target, Settings())
    beside = {name: getattr(default, name) for name in SHAPE if name != "head_dim"} | {"head_dim": head_width(target)}
    beside[ROPE] = {name: value for name, value in dict(target.rope_parameters).items() if value is not None}
    return {name: value for name, value in own.items() if value != beside[name]}
