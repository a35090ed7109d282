"""The configuration of a draft's layer: as torch builds it here, and as engines find it in config.json.

The layer's shape is what its target's family gives it, but for what the draft has of its own, as drafts begun elsewhere often
have. Engines load it as LlamaForCausalLMEagle3.

Read in vLLM 0.32 (model_executor/models/llama_eagle3.py, v1/worker/gpu_model_runner.py), SGLang 0.5.23
(srt/models/llama_eagle3.py, model_runner_components/spec_aux_hidden_state.py) and transformers 5.23 (LlamaConfig):

auxiliary layers: vLLM looks at eagle_aux_hidden_state_layer_ids itself first, and means inputs of layers; SGLang looks into
    eagle_config alone and means outputs: it adds one to each. So these are inputs here and, one less, outputs there.
norm_before_residual: the residual is the feature after hidden_norm, not the feature itself. norm_before_fc: one norm over all
    auxiliary states together, `input_norm.weight`; fc_norm: one for each, `fc_norm.0.weight` and so on. norm_output: the normed
    hidden state is fed back. vLLM reads all four, SGLang none.
sliding_window counts the query itself, and is looked at where layer_types says so; vLLM alone reads it from here.
rope_parameters is transformers' form of 5.0 on; rope_theta, rope_scaling and partial_rotary_factor are those of before.
dtype: of the target, in which an engine computes; the files hold what was trained. Engines that are left to choose take float16
    for a draft that says float32.
"""

from copy import copy
from typing import Any

from longspec.methods.eagle3.settings import ARCHITECTURE, Settings
from longspec.methods.eagle3.shape import SHAPE, ffn_width, layers_of
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


OF_THE_TARGET = (  # but where the layer has a shape of its own
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)
DEFAULT_ROPE, PARTIAL = "default", "partial_rotary_factor"


def config_fields(config: Any, settings: Settings) -> dict[str, Any]:
    """The fields of config.json. Raises ValueError for layers that the target does not have."""
    layers = list(layers_of(settings.layers, config.num_hidden_layers))
    config = layer_config(config, settings)
    fields = {name: getattr(config, name) for name in OF_THE_TARGET} | {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": head_width(config),
        "draft_vocab_size": settings.vocabulary or config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
        "settings": {"layers": layers},
    }
    if config.dtype is not None:
        fields |= dict.fromkeys(("dtype", "torch_dtype"), str(config.dtype).removeprefix("torch."))
    if settings.sliding_window is not None:
        fields |= {"layer_types": ["sliding_attention"], "sliding_window": settings.sliding_window}
    # Rotation and its scaling, in the newer form and the older one.
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    fields["rope_scaling"] = None if rope["rope_type"] == DEFAULT_ROPE else scaling
    return fields | {name: rope[name] for name in (PARTIAL,) if name in rope}
