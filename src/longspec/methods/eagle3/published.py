"""Read EAGLE-3 drafts that other trainers published into our own tensors and settings.

There are two layouts. The engines' layout (SGLang's trainer, AngelSlim, EAGLE-3's authors) has `midlayer.*`, and the layer's
fields in config.json. The layout of the package `speculators` has `layers.0.*`, and the layer's fields in
`transformer_layer_config`. Missing fields have LlamaConfig's defaults, as in both engines. So most drafts for Llama-3.1 rotate
with a rope_theta of 10,000, unlike their target. layer.py says what each field means to which engine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from longspec.distributed import log
from longspec.methods.eagle3.settings import AUXILIARY, NORMS, Settings
from longspec.methods.published_files import HEAD, Published

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# A field of the layer or of the draft -> the values with which our layer computes the same; None: missing.
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
    "use_aux_hidden_state": (None, True),
    "num_aux_hidden_states": (None, AUXILIARY),
    "parallel_drafting": (None, False),
    "pard_token": (None,),
    "mask_token_id": (None,),
}


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor]
) -> tuple[dict[str, Tensor], Settings]:
    """Read a published draft, as methods/contract.py describes."""
    draft = Published.of(folder, config, target, LlamaConfig, "eagle_config")
    draft.check(REPRESENTED)
    inputs, outputs = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    layers = draft.layers(Settings, LAYER_IDS, inputs, outputs)
    if outputs and not inputs:
        log(
            f"{draft.file}: eagle_config.{LAYER_IDS}: taken for outputs, as SGLang does: inputs of layers {list(layers)}. vLLM "
            f"takes them for inputs; where the draft was trained so, move {LAYER_IDS} to the top of a copy's config.json"
        )
    flags = {name: draft.found.get(name) for name in NORMS}
    if flags["norm_before_residual"] is None and "speculators_model_type" in config:
        log(f"{draft.file}: norm_before_residual: missing; taken for true, as vLLM does in this layout")
        flags["norm_before_residual"] = True
    state = draft.tensors(embeddings, ("layers.0.", "midlayer."))
    if HEAD not in state:
        raise ValueError(f"{folder}: {HEAD}: is missing; a draft that takes the target's head cannot be represented")
    return state, draft.settings(
        Settings,
        state,
        layers=layers,
        sliding_window=draft.window(1),
        **{name: False if value is None else value for name, value in flags.items()},
    )
