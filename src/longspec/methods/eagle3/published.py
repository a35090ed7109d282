"""EAGLE-3 drafts that other trainers published, read into the house's own tensors and settings.

Two layouts. That of the engines (SGLang's trainer, AngelSlim, the authors of EAGLE-3): `midlayer.*` and a config.json whose
fields are the layer's. That of the package `speculators`: `layers.0.*`, and the layer's fields in `transformer_layer_config`.
Fields that are left out have LlamaConfig's defaults, as both engines take them: so most drafts for Llama-3.1 turn by a
rope_theta of 10,000, which is not their target's. What each field means to which engine: layer.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from longspec.distributed import log
from longspec.methods.eagle3.settings import AUXILIARY, MOST_STEPS, NORMS, Settings, layers_of
from longspec.methods.layer_shape import check_values
from longspec.methods.published_files import (
    ELSEWHERE,
    EMBEDDINGS,
    HEAD,
    OF_CONFIG,
    check_embeddings,
    own_names,
    own_shape,
    strange_fields,
    vocabulary_of,
    warn_of_positions,
)
from longspec.models.weight_files import read_folder, telling_damage

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
    faults = strange_fields(found, REPRESENTED, llama, target)
    if (types := found.get("layer_types") or [FULL])[0] not in (SLIDING, FULL):
        faults.append(f"layer_types: is {types!r}, must be a list of {SLIDING} or {FULL}")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        faults.append("eagle_config.use_aux_hidden_state: is False, a draft of ours reads the target's auxiliary states")
    if faults:
        raise ValueError(f"{file}: {'; '.join(faults)}; give the target it was trained for, or take another draft")


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor], layers: tuple[int, ...] | None
) -> tuple[dict[str, Tensor], Settings]:
    """Return the state dict of our layer, and its settings, of a published draft for a target of this configuration.

    config: of its config.json; embeddings: reads the target's, [T, H]; layers: of the target, whose inputs the draft reads, for
    folders that do not say it beyond doubt. Raises ValueError with file, key and both values for what we cannot represent.
    """
    file = folder / "config.json"
    of_speculators = "speculators_model_type" in config
    with telling_damage(file, "is no configuration of a draft"):
        layer = config["transformer_layer_config"] if of_speculators else config
        llama = LlamaConfig(**{name: layer[name] for name in OF_CONFIG if layer.get(name) is not None})
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
    state = own_names(read_folder(folder), folder, ("layers.0.", "midlayer."))
    check_embeddings(state.pop(EMBEDDINGS, None), embeddings, folder)
    if HEAD not in state:
        raise ValueError(f"{folder}: {HEAD}: is missing; a draft that takes the target's head cannot be represented")
    vocabulary, ids = vocabulary_of(state, config.get("draft_vocab_size"), target.vocab_size, folder)
    values = {
        "layers": _layers(config.get(LAYER_IDS), eagle.get(LAYER_IDS), layers, target.num_hidden_layers, file),
        "vocabulary": vocabulary,
        "sliding_window": layer.get("sliding_window") if slides else None,
        **{name: False if value is None else value for name, value in flags.items()},
        **own_shape(llama, target, Settings, file),
        "steps": Settings().steps if steps is None else steps,
        "target_vocabulary": None if ids is None else target.vocab_size,
    }
    check_values(Settings, values, str(file), ELSEWHERE)
    warn_of_positions(llama, target, file)
    return state, Settings(**values, ids=ids)


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
