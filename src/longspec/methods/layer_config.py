"""Configure a draft's own decoder layers next to its target, for torch, and for engines, which read config.json."""

from copy import copy
from typing import Any

from longspec.methods.layer_shape import PARTIAL, SHAPE, LayerSettings, ffn_width
from longspec.models.target import head_width

LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
OF_THE_TARGET = (*LAYER_FIELDS, "bos_token_id", "eos_token_id")  # unless the layer has a shape of its own
OF_ONE_LAYER = (  # of a draft of one layer, in other programs' layouts
    *OF_THE_TARGET,
    "model_type",
    "num_hidden_layers",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_parameters",
)
DEFAULT_ROPE = "default"


def layer_config(config: Any, settings: LayerSettings) -> Any:
    """Return the target's configuration with the layer's own shape; the unchanged object if the draft has none of its own."""
    own = {name: getattr(settings, name) for name in SHAPE if getattr(settings, name) is not None}
    if ffn_width(config) != config.intermediate_size:
        own = {"intermediate_size": ffn_width(config)} | own
    if not own:
        return config
    shaped = copy(config)
    # head_dim is set: if the target's configuration has none, another number of heads would change the head width.
    for name, value in ({"head_dim": head_width(config)} | own).items():
        setattr(shaped, name, value)
    if head_width(shaped) != head_width(config) and PARTIAL in shaped.rope_parameters:
        raise ValueError(
            f"recipe.method.head_dim: {shaped.head_dim}: the target turns a part of its heads of {head_width(config)}, "
            "a layer with heads of its own turns them whole; give recipe.method.rope_parameters: "
            "{rope_type: default, rope_theta: 10000.0}, or leave head_dim out"
        )
    if shaped.num_attention_heads % shaped.num_key_value_heads:
        raise ValueError(
            f"recipe.method.num_key_value_heads: {shaped.num_key_value_heads} do not divide the layer's "
            f"{shaped.num_attention_heads} heads (recipe.method.num_attention_heads; null: the target's)"
        )
    return shaped


def turns_otherwise(config: Any, settings: LayerSettings) -> bool:
    """Tell whether the layer's rotations differ from the target's at the same positions."""
    width = settings.head_dim not in (None, head_width(config))
    return width or settings.rope_parameters not in (None, dict(config.rope_parameters))


def shape_fields(config: Any, settings: LayerSettings) -> dict[str, Any]:
    """Return the fields of config.json for shape and rotation; the rotation in its newer form and the older one."""
    config = layer_config(config, settings)
    fields = {name: getattr(config, name) for name in OF_THE_TARGET} | {
        "head_dim": head_width(config),
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    if config.dtype is not None:
        fields |= dict.fromkeys(("dtype", "torch_dtype"), str(config.dtype).removeprefix("torch."))
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    fields["rope_scaling"] = None if rope["rope_type"] == DEFAULT_ROPE else scaling
    return fields | {name: rope[name] for name in (PARTIAL,) if name in rope}
