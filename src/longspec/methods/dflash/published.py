"""DFlash drafts that other trainers published, read into the house's own tensors and settings.

Two layouts. That of the engines (z-lab/*, and a draft folder of ours): the layers' fields in config.json itself, and in
`dflash_config.target_layer_ids` the target's layers whose outputs are read. That of the package `speculators`: the layers'
fields in `transformer_layer_config`, and in `aux_hidden_state_layer_ids` the target's layers whose inputs are read. Tensors
have the same names in both. Fields that are left out have Qwen3Config's defaults, as in engines.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from longspec.methods.dflash.layer import K_NORM
from longspec.methods.dflash.settings import Settings, mask_token_of
from longspec.methods.layer_shape import check_values
from longspec.methods.published_files import ELSEWHERE, HEAD, Published
from longspec.models.weight_files import telling_damage

SLIDING, FULL = "sliding_attention", "full_attention"
MASK_EMBEDDING = "mask_embedding.pt"
# Field of the layers, of the draft, or of dflash_config -> its values that mean what our layers compute, a missing one too.
REPRESENTED: dict[str, tuple[Any, ...]] = {
    "model_type": (None, "qwen3"),
    "attention_bias": (None, False),
    "quantization_config": (None,),
    "logit_scale": (None, 1, 1.0),
    "sample_from_anchor": (None, False),
    "use_aux_hidden_state": (None, True),
    "attention_value_scale": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
}


def window_of(found: dict[str, Any], depth: int, file: Path) -> int | None:
    """Return the window of all layers; None: none. Raises ValueError for layers of both kinds, or of another causality.

    Ours that slide are causal within a block, and others are not. is_causal wins over causal, as in vLLM.
    """
    types = found.get("layer_types") or [SLIDING if found.get("use_swa") else FULL] * depth
    if len(types) != depth or len(set(types)) > 1 or types[0] not in (SLIDING, FULL):
        raise ValueError(f"{file}: layer_types: is {types!r}, must be {depth} times {SLIDING}, or {FULL}; take another draft")
    slides = types[0] == SLIDING
    non_causal = found.get("sliding_window_non_causal")
    causal = next((found[name] for name in ("is_causal", "causal") if found.get(name) is not None), slides)
    if causal != slides or (slides and non_causal):
        raise ValueError(
            f"{file}: is_causal, causal, sliding_window_non_causal: slots in layers of {types[0]} see "
            f"{'earlier' if causal and not non_causal else 'all'} slots of their block; in drafts of ours those in layers of "
            f"{SLIDING} see earlier ones, those of {FULL} all; take another draft"
        )
    window = found.get("sliding_window") or found.get("swa_window_size")
    return int(window) if slides and window is not None else None


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor]
) -> tuple[dict[str, Tensor], Settings]:
    """Return the state dict of our layer, and its settings, of a published draft for a target of this configuration.

    config: of its config.json; embeddings: reads the target's, [T, H]. Raises ValueError with file, key and both values for
    what we cannot represent.
    """
    draft = Published.of(folder, config, target, Qwen3Config, "dflash_config")
    found, file = draft.found, draft.file
    with telling_damage(file, "is no configuration of a draft"):
        depth, told = draft.layer["num_hidden_layers"], found.get("num_target_layers")
    faults = [f"num_target_layers: is {told!r}, the target has {target.num_hidden_layers}"]
    draft.check(REPRESENTED, faults if told not in (None, target.num_hidden_layers) else [])
    if (folder / MASK_EMBEDDING).is_file():
        raise ValueError(f"{folder / MASK_EMBEDDING}: drafts of ours fill slots by a token's embedding; take another draft")
    state = draft.tensors(embeddings)
    are_inputs = "speculators_model_type" in config
    key = "aux_hidden_state_layer_ids" if are_inputs else "target_layer_ids"
    check_values(Settings, {"layers": found.get(key)}, f"{file}: {key}", ELSEWHERE)
    said = [layer + (not are_inputs) for layer in found.get(key) or ()]
    settings = draft.settings(
        Settings,
        state,
        layers=draft.layers(said, Settings, key),
        depth=depth,
        block_size=found.get("block_size"),
        mask_token=mask_token_of(found.get("mask_token_id"), target.vocab_size),
        sliding_window=window_of(found, depth, file),
        tied_k_norm=_tie_k_norms(state, depth),
    )
    if HEAD in state and settings.ids is None:
        raise ValueError(f"{folder}: {HEAD}: a head of its own for all tokens cannot be represented; take another draft")
    return state, settings


def _tie_k_norms(state: dict[str, Tensor], depth: int) -> bool:
    """Return whether the norms of keys are the same in all layers; then the first layer's alone stays in `state`."""
    names = [K_NORM.format(number) for number in range(depth)]
    first = state.get(names[0])
    tied = first is not None and all(name in state and torch.equal(state[name], first) for name in names)
    for name in names[1:] if tied else ():
        del state[name]
    return tied
