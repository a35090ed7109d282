"""Read drafts that other trainers published into our own names of tensors, embeddings, draft vocabulary and shape."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.distributed import log
from longspec.methods.draft_files import CONFIG
from longspec.methods.layer_config import LAYER_FIELDS, layer_config
from longspec.methods.layer_shape import ROPE, SHAPE, LayerSettings, Settings, check_shape, check_values
from longspec.methods.vocabulary_tensors import D2T, T2D, ids_of
from longspec.models.target import head_width
from longspec.models.weight_files import read_folder, telling_damage

OF_CONFIG = (*LAYER_FIELDS, "head_dim", "rope_theta", "rope_scaling", "rope_parameters")
SLIDING, FULL = "sliding_attention", "full_attention"
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
# Tensors of the target, or computed ones: our drafts store neither.
NOT_THE_DRAFTS = ("verifier_norm.weight", "verifier_lm_head.weight")
INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
ELSEWHERE = "correct a copy of the folder, or take another draft"


@dataclass(frozen=True)
class Published:
    """Hold a published draft and its target.

    target, shape: transformers' configurations of the target and of the draft's layers; layer: the layers' fields in
    config.json; found: these, the whole draft's fields and those of `more`.
    """

    folder: Path
    target: Any
    shape: Any
    layer: dict[str, Any]
    found: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], target: Any, kind: type, more: str) -> "Published":
        """Read the fields of a config.json as a configuration of class `kind` does. more: a key with further fields."""
        with telling_damage(folder / CONFIG, "is no configuration of a draft"):
            layer = config["transformer_layer_config"] if "speculators_model_type" in config else config
            shape = kind(**{name: layer[name] for name in OF_CONFIG if layer.get(name) is not None})
            own = {name: value for name, value in config.items() if name != "model_type"}
            return cls(folder, target, shape, layer, own | layer | (config.get(more) or {}))

    @property
    def file(self) -> Path:
        return self.folder / CONFIG

    def check(self, represented: dict[str, tuple[Any, ...]]) -> None:
        """Raise ValueError, with the field and both values, for what our layers with this target cannot represent.

        represented: field -> the values that we can represent; None: missing.
        """
        rope = self.shape.rope_parameters
        of_target = {"target_hidden_size": "hidden_size", "num_target_layers": "num_hidden_layers"}
        beside = [(name, getattr(self.shape, name), name) for name in ("hidden_size", "vocab_size", "hidden_act")]
        beside += [(name, self.found.get(name), key) for name, key in of_target.items()]
        wrong = [
            *(
                f"{name}: is {self.found[name]!r}, a draft of ours has {' or '.join(map(repr, values[1:])) or 'none'}"
                for name, values in represented.items()
                if self.found.get(name) not in values
            ),
            *(
                f"{name}: {rope[name]!r} in the rotation, a draft of ours turns whole heads by positions alone"
                for name in ("mrope_section", "partial_rotary_factor")
                if rope.get(name) not in (None, 1, 1.0)
            ),
            *(
                f"{name}: is {own!r}, the target has {getattr(self.target, key)!r}"
                for name, own, key in beside
                if own not in (None, getattr(self.target, key))
            ),
        ]
        if wrong:
            raise ValueError(f"{self.file}: {'; '.join(wrong)}; give the target it was trained for, or take another draft")

    def window(self, depth: int, other: int | None = None, *, slides: bool = False) -> int | None:
        """Return the window of all `depth` layers, None: none. Raises ValueError if some layers have one and others none.

        slides: whether layers slide by default; other: a window under another name, which then has priority.
        """
        kinds = self.found.get("layer_types") or [FULL] * depth
        if slides and kinds == [FULL] * depth:
            kinds = [SLIDING] * depth
        if kinds not in ([SLIDING] * depth, [FULL] * depth):
            told = f"is {kinds!r}, must be {depth} times {SLIDING}, or {FULL}"
            raise ValueError(f"{self.file}: layer_types: {told}; take another draft")
        window = (other if slides else None) or self.found.get("sliding_window") or other
        return int(window) if kinds[0] == SLIDING and window is not None else None

    def tensors(self, embeddings: Callable[[], Tensor], rename: tuple[str, str] = ("", "")) -> dict[str, Tensor]:
        """Return the tensors by our names. rename: a beginning of names, and our beginning.

        Raises ValueError if there are embeddings that differ from the target's by more than their dtype's rounding.
        """
        own: dict[str, Tensor] = {}
        for name, tensor in read_folder(self.folder).items():
            plain = name.removeprefix("model.")
            if plain in NOT_THE_DRAFTS or plain.endswith(INVERSE_FREQUENCIES):
                log(f"{self.folder}: {name}: left out, it is the target's or follows from {ROPE}")
                continue
            plain = plain.replace(*rename, 1) if plain.startswith(rename[0]) else plain
            if plain in own:
                raise ValueError(f"{self.folder}: {name}: stands there twice, with and without a prefix; {ELSEWHERE}")
            own[plain] = tensor
        found = own.pop(EMBEDDINGS, None)
        if found is not None:
            target = embeddings()
            alike = found.shape == target.shape and (
                torch.equal(target.to(found.dtype), found) or torch.equal(found.to(target.dtype), target)
            )
            if not alike:
                raise ValueError(
                    f"{self.folder}: {EMBEDDINGS}: differs from the target's, which our drafts share. Give the target that the "
                    "draft was trained for; a draft that trained embeddings of its own cannot be represented"
                )
            log(f"{self.folder}: {EMBEDDINGS}: left out, it is the target's own")
        return own

    def layers(
        self, schema: type[LayerSettings], key: str, inputs: list[int] | None, outputs: list[int] | None
    ) -> tuple[int, ...]:
        """Return the layers whose inputs are read: from the file, by inputs or by outputs, or else the engines' default.

        Raises ValueError unless they ascend and the target has them all.
        """
        for said in (inputs, outputs):
            check_values(schema, {"layers": said}, f"{self.file}: {key}", ELSEWHERE)
        first, last, count = schema.first, self.target.num_hidden_layers - 1, schema.count
        chosen = tuple(inputs or [layer + 1 for layer in outputs or ()])
        if not chosen:
            chosen = schema().read_of(last + 1)
            log(f"{self.file}: {key}: missing; engines' default, inputs of layers {list(chosen)}, is taken")
        ascending = sorted({each for each in chosen if first <= each <= last})
        if list(chosen) != ascending or len(chosen) != (count or len(chosen)):
            raise ValueError(
                f"{self.file}: {key}: inputs of layers {list(chosen)}: must be {f'{count} ' if count else ''}of the target's "
                f"layers {first} to {last}, ascending, each once; {ELSEWHERE}"
            )
        return chosen

    def settings(self, schema: type[Settings], state: dict[str, Tensor], **values: Any) -> Settings:
        """Return the settings: shape and draft vocabulary from the file and its tensors, and `values`.

        d2t and t2d are removed from `state`; of the shape only values that differ from the target's are set.
        """
        ids, tokens = None, self.target.vocab_size
        tables = {name: state.pop(name).to(torch.int64) for name in (D2T, T2D) if name in state}
        if HEAD in state and len(state[HEAD]) != tokens:
            ids = ids_of(tables, len(state[HEAD]), tokens, self.folder, ELSEWHERE)
            values |= {"vocabulary": len(ids), "target_vocabulary": tokens}
        elif D2T in tables and bool(tables[D2T].any()):
            raise ValueError(f"{self.folder}: {D2T}: moves tokens, though all {tokens} are proposed; {ELSEWHERE}")
        rope = {name: value for name, value in self.shape.rope_parameters.items() if name != "type" and value is not None}
        if rope["rope_type"] == "yarn":  # else the scaling would follow the target's number of positions
            rope.setdefault("original_max_position_embeddings", self.shape.max_position_embeddings)
        own = {name: getattr(self.shape, name) for name in SHAPE} | {ROPE: rope}
        positions, wanted = self.shape.max_position_embeddings, self.target.max_position_embeddings
        if positions < wanted:
            log(
                f"warning: {self.file}: max_position_embeddings: is {positions}, the target has {wanted}: acceptance falls on "
                "longer texts; train it on rows that are as long as the texts to be drafted"
            )
        check_values(schema, values | own, str(self.file), ELSEWHERE)
        check_shape(own, f"{self.file}: ")
        default = layer_config(self.target, schema())
        beside = {name: getattr(default, name) for name in SHAPE if name != "head_dim"} | {"head_dim": head_width(self.target)}
        beside[ROPE] = {name: value for name, value in dict(self.target.rope_parameters).items() if value is not None}
        return schema(**{"vocabulary": None} | values | {k: v for k, v in own.items() if v != beside[k]}, ids=ids)
