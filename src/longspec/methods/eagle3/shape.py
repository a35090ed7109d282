"""The shape of a draft's layer: what its target's family gives it, but for what the draft has of its own, as drafts begun
elsewhere often have.
"""

from copy import copy
from typing import Any

from longspec.methods.eagle3.settings import SHAPE, Settings, ffn_width
from longspec.models.target import head_width


def layer_config(config: Any, settings: Settings) -> Any:
    """The target's configuration with the layer's own shape in it; the target's own where the draft has none."""
    own = {name: getattr(settings, name) for name in SHAPE if getattr(settings, name) is not None}
    if ffn_width(config) != config.intermediate_size:
        own = {"intermediate_size": ffn_width(config)} | own
    if not own:
        return config
    shaped = copy(config)
    # Else another number of heads would give them another width, where the target's configuration names none.
    for name, value in ({"head_dim": head_width(config)} | own).items():
        setattr(shaped, name, value)
    if head_width(shaped) != head_width(config) and "partial_rotary_factor" in shaped.rope_parameters:
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


def turns_otherwise(config: Any, settings: Settings) -> bool:
    """Whether the layer's rotations are not those that the target makes of the same positions."""
    width = settings.head_dim not in (None, head_width(config))
    return width or settings.rope_parameters not in (None, dict(config.rope_parameters))
