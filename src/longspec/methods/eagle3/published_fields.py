"""The fields of a published EAGLE-3 draft's config.json, whichever of the two layouts it has, and which we can represent."""

from pathlib import Path
from typing import Any

from longspec.distributed import log
from longspec.methods.eagle3.settings import AUXILIARY, MOST_STEPS, Settings

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
SLIDING = "sliding_attention"
LAYER_TYPES = (SLIDING, "full_attention")
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


class Fields:
    """Fields by what they say. top: of the draft; layer: of its decoder layer, which one of the layouts has in a section."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        self.file, self.top = file, config
        self.of_speculators = "speculators_model_type" in config
        self.layer = self._section("transformer_layer_config") if self.of_speculators else config
        self.eagle = self._section("eagle_config")

    def _section(self, name: str) -> dict[str, Any]:
        found = self.top.get(name) or {}
        if not isinstance(found, dict):
            raise self._strange(name, found, "an object")
        return found

    def _strange(self, name: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.file}: {name}: is {value!r}, must be {wanted}; correct a copy of the folder")

    def of_llama(self) -> dict[str, Any]:
        """Those that LlamaConfig takes; what is missing has its defaults there."""
        return {name: self.layer[name] for name in OF_LLAMA if self.layer.get(name) is not None}

    def flag(self, name: str) -> bool:
        """A field that is true or false. Raises ValueError for another value."""
        value = self.top.get(name)
        if name == "norm_before_fc" and name in self.eagle:
            value = self.eagle[name]
        if value is None and name == "norm_before_residual" and self.of_speculators:
            log(f"{self.file}: {name}: missing; taken for true, as vLLM does in this layout")
            return True
        if value not in (None, True, False):
            raise self._strange(name, value, "true or false")
        return bool(value)

    def layers(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """The auxiliary layers, by their inputs and by their outputs; None where the file does not say it so."""
        return self._numbers(self.top.get(LAYER_IDS)), self._numbers(self.eagle.get(LAYER_IDS))

    def _numbers(self, value: Any) -> tuple[int, ...] | None:
        if value in (None, []):
            return None
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise self._strange(LAYER_IDS, value, "numbers of layers")
        return tuple(value)

    def sliding_window(self) -> int | None:
        """The keys that the layer's attention sees, where layer_types says that it slides, as vLLM has it; None: all."""
        types = self.layer.get("layer_types") or []
        if not isinstance(types, list) or any(each not in LAYER_TYPES for each in types):
            raise self._strange("layer_types", types, f"a list of {' or '.join(LAYER_TYPES)}")
        return self.layer.get("sliding_window") if types[:1] == [SLIDING] else None

    def steps(self) -> int:
        """The tokens of a chain that it was trained for: what `speculators` proposes, else the default."""
        proposals = self._section("speculators_config").get("proposal_methods") or [{}]
        if not isinstance(proposals, list) or not isinstance(proposals[0], dict):
            raise self._strange("speculators_config.proposal_methods", proposals, "a list of objects")
        steps = proposals[0].get("speculative_tokens")
        if type(steps) is int and steps > MOST_STEPS:
            log(f"{self.file}: speculative_tokens: is {steps}; taken for {MOST_STEPS}, the longest chain that is trained")
            return MOST_STEPS
        return Settings().steps if steps is None else steps


def check_represented(fields: Fields, layer: Any, target: Any) -> None:
    """Raise ValueError, with file, field and both values, for what our layer beside this target cannot be.

    layer: the LlamaConfig of its fields; target: the target's configuration.
    """
    found = {name: value for name, value in fields.top.items() if name != "model_type"} | fields.layer
    rope = layer.rope_parameters
    faults = [
        f"{name}: is {found[name]!r}, a draft of ours has {' or '.join(map(repr, values[1:])) or 'none'}"
        for name, values in REPRESENTED.items()
        if found.get(name) not in values
    ]
    if fields.eagle.get("use_aux_hidden_state") is False:
        faults.append("eagle_config.use_aux_hidden_state: is False, a draft of ours reads the target's auxiliary states")
    faults += [
        f"{name}: {rope[name]!r} in the rotation, a draft of ours turns whole heads by their positions alone"
        for name in ("mrope_section", "partial_rotary_factor")
        if rope.get(name) not in (None, 1, 1.0)
    ]
    width = found.get("target_hidden_size")
    for name, own, wanted in (
        ("hidden_size", layer.hidden_size, target.hidden_size),
        ("target_hidden_size", target.hidden_size if width is None else width, target.hidden_size),
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("hidden_act", layer.hidden_act, target.hidden_act),
    ):
        if own != wanted:
            faults.append(f"{name}: is {own!r}, the target has {wanted!r}")
    if faults:
        raise ValueError(f"{fields.file}: {'; '.join(faults)}; give the target it was trained for, or take another draft")
