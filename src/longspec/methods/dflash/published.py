"""Read DFlash drafts that other trainers published into our own tensors and settings.

There are two layouts. The engines' layout (z-lab/*, and our draft folders) has the layers' fields in config.json itself, and in
`dflash_config.target_layer_ids` the target's layers whose outputs are read. The layout of the package `speculators` has the
layers' fields in `transformer_layer_config`, and in `aux_hidden_state_layer_ids` the target's layers whose inputs are read.
Tensors have the same names in both. Missing fields have Qwen3Config's defaults, as in engines.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from longspec.methods.dflash.layer import K_NORM
from longspec.methods.dflash.settings import Settings, mask_token_of
from longspec.methods.draft_files import MASK_EMBEDDING
from longspec.methods.published_files import HEAD, SLIDING, Published
from longspec.models.weight_files import telling_damage

# A field of the layers, of the draft, or of dflash_config -> the values with which our layers compute the same; None: missing.
REPRESENTED: dict[str, tuple[Any, ...]] = {
    "model_type": (None, "qwen3"),
    "attention_bias": (None, False),
    "quantization_config": (None,),
    "logit_scale": (None, 1, 1.0),
    "sample_from_anchor": (None, False),
    "use_aux_hidden_state": (None, True),
    "attention_value_scale": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
}


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor]
) -> tuple[dict[str, Tensor], Settings]:
    """Read a published draft, as methods/contract.py describes."""
    draft = Published.of(folder, config, target, Qwen3Config, "dflash_config")
    found, file = draft.found, draft.file
    with telling_damage(file, "is no configuration of a draft"):
        depth = draft.layer["num_hidden_layers"]
    are_inputs = "speculators_model_type" in config
    window = draft.window(depth, found.get("swa_window_size"), slides=bool(found.get("use_swa")))
    # What engines assume for a missing field.
    if are_inputs:
        found.setdefault("sliding_window_non_causal", window is not None)
    elif found.get("use_swa") and SLIDING not in (found.get("layer_types") or ()):
        found.setdefault("is_causal", False)
    causality = dict.fromkeys(("is_causal", "causal"), (None, window is not None))  # of slots within a block
    causality |= {} if window is None else {"sliding_window_non_causal": (None, False)}
    draft.check(REPRESENTED | causality)
    if (folder / MASK_EMBEDDING).is_file():
        raise ValueError(f"{folder / MASK_EMBEDDING}: drafts of ours fill slots by a token's embedding; take another draft")
    state = draft.tensors(embeddings)
    key = "aux_hidden_state_layer_ids" if are_inputs else "target_layer_ids"
    said = (found.get(key), None)
    settings = draft.settings(
        Settings,
        state,
        layers=draft.layers(Settings, key, *(said if are_inputs else said[::-1])),
        depth=depth,
        block_size=found.get("block_size"),
        mask_token=mask_token_of(found.get("mask_token_id"), target.vocab_size, f"{file}: mask_token_id"),
        sliding_window=window,
        tied_k_norm=_tie_k_norms(state, depth),
    )
    if HEAD in state and settings.ids is None:
        raise ValueError(f"{folder}: {HEAD}: a head of its own for all tokens cannot be represented; take another draft")
    return state, settings


def _tie_k_norms(state: dict[str, Tensor], depth: int) -> bool:
    """Tell whether all layers have the same norm of keys; if so, keep only the first layer's in `state`."""
    names = [K_NORM.format(number) for number in range(depth)]
    first = state.get(names[0])
    tied = first is not None and all(name in state and torch.equal(state[name], first) for name in names)
    for name in names[1:] if tied else ():
        del state[name]
    return tied
