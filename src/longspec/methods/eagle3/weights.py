"""EAGLE-3 weights under the names that engines load, and the settings that a draft folder holds."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from longspec.methods import draft_files
from longspec.methods.draft_files import METHOD, again, draft_weights_file
from longspec.methods.eagle3.engine_config import config_fields
from longspec.methods.eagle3.settings import AUXILIARY, MEANING, NAME, SHAPE, Settings, check_shape, layers_of
from longspec.methods.eagle3.vocabulary_tensors import D2T, T2D, ids_of, vocabulary_tensors
from longspec.methods.layer_state import check_state
from longspec.models.weight_files import read_tensors

NORMS_BEFORE_FC = {
    "fc_norm": "; recipe.method.fc_norm says whether there are norms before fc",
    "input_norm": "; recipe.method.norm_before_fc says whether there is one norm before fc",
}


COUNTS = (
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Of the target, and no part of the section `target`: they are taken as the file has them.
NOT_STORED = ("hidden_act", "bos_token_id", "eos_token_id")
MAY_BE_LEFT_OUT = ("layer_types", "sliding_window", "partial_rotary_factor")  # by config_fields, where there is none


def published_layout(state: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The layer's own names, with d2t and t2d where some of the target's tokens are proposed and they are known."""
    if settings.ids is not None:
        assert settings.target_vocabulary is not None, "ids come with the size of the vocabulary that they are chosen from"
        state = state | vocabulary_tensors(settings.ids, settings.target_vocabulary)
    return dict(sorted(state.items()))


def check_draft_state(
    layer: nn.Module, state: dict[str, Tensor], source: object, content: dict[str, Any] | None = None
) -> None:
    """Raise ValueError as of check_state, and for a d2t or t2d of another draft vocabulary; a checkpoint has neither.

    content: of the config.json beside the weights, where there is one.
    """
    weights = {name: tensor for name, tensor in state.items() if name not in (D2T, T2D)}
    strange = layer.state_dict().keys() ^ weights.keys()
    hint = "".join(told for name, told in NORMS_BEFORE_FC.items() if name in str(strange))
    check_state(layer, weights, source, hint=hint)
    own_V = known_ids(layer)
    if own_V is None or len(weights) == len(state):
        return
    found_V = torch.tensor(ids_of(state, len(own_V), None, source, again(content)))
    if not torch.equal(found_V, own_V):
        token = int((found_V != own_V).nonzero()[0])
        raise ValueError(
            f"{source}: {D2T}: draft token {token} is the target's {int(found_V[token])}, in this draft's vocabulary it is "
            f"{int(own_V[token])}; give a draft of the same vocabulary, or take its run's by recipe.method.vocabulary_from"
        )


def load_draft_weights(layer: nn.Module, path: str | Path) -> None:
    """Fill a layer from what draft_weights_file takes.

    Raises ValueError as of check_draft_state, for another method's folder, and for a file that does not tell its vocabulary.
    """
    file = draft_weights_file(path)
    config = _of_this_method(path)
    content = None if config is None else config[1]
    found, own_V = read_tensors(file), known_ids(layer)
    check_draft_state(layer, found, file, content)
    if D2T not in found and own_V is not None and not torch.equal(own_V, torch.arange(len(own_V))):
        raise ValueError(f"{file}: {D2T}: is missing, must hold the draft vocabulary's {len(own_V)} tokens; {again(content)}")
    layer.load_state_dict({name: tensor for name, tensor in found.items() if name not in (D2T, T2D)})


def check_same_draft(path: str | Path, config: Any, settings: Settings) -> None:
    """Hold a draft folder, which a training begins with or which is measured, against its target's configuration and settings.

    Raises ValueError that names the field and both values; files of weights alone say nothing of themselves.
    """
    draft_files.check_draft_config(path, config)
    if _of_this_method(path) is None:
        return
    stored = draft_settings(path)
    own = replace(settings, layers=layers_of(settings.layers, config.num_hidden_layers))
    draft_files.check_same_settings(path, "recipe.method", MEANING, own, stored)


def draft_settings(path: str | Path) -> Settings:
    """The settings of a draft folder, its tokens from d2t.

    Raises ValueError with file, key and both values where they are strange, or at odds with what engines read.
    """
    found, settings = _of_this_method(path), draft_files.stored_settings(path, Settings)
    if found is None or settings is None:
        raise ValueError(
            f"{path}: has no config.json of a draft beside it, and does not tell its settings; give a draft folder"
        )
    file, content = found
    check_folder(settings, content, file)
    tokens, weights_file = content["target"]["vocab_size"], draft_weights_file(path)
    state = read_tensors(weights_file, lambda name: name in (D2T, T2D))
    if settings.vocabulary not in (None, tokens):
        return replace(
            settings, ids=ids_of(state, settings.vocabulary, tokens, weights_file, again(content)), target_vocabulary=tokens
        )
    own = sorted(state.keys() & {D2T, T2D})
    if own:
        told = f"by settings: vocabulary of {file.name} all {tokens} tokens are proposed"
        raise ValueError(f"{weights_file}: {', '.join(own)}: is there, but {told}; {again(content)}")
    return settings if settings.vocabulary is None else replace(settings, ids=tuple(range(tokens)), target_vocabulary=tokens)


def known_ids(layer: nn.Module) -> Tensor | None:
    """The target's tokens that a layer proposes; None for a layer without numbers, and for one that no vocabulary was given."""
    own_V = layer.ids_V
    assert own_V is None or isinstance(own_V, Tensor)
    return None if own_V is None or own_V.is_meta else own_V.cpu()


def _of_this_method(path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Path and content of the config.json beside a draft's weights, None without. Raises ValueError for another method's."""
    found = draft_files.read_draft_config(path)
    if found is not None and found[1][METHOD] != NAME:
        raise ValueError(f"{found[0]}: {METHOD}: is {found[1][METHOD]!r}, this draft is {NAME!r}; give a draft of this method")
    return found


def check_folder(settings: Settings, content: dict[str, Any], file: Path) -> None:
    """Hold a draft folder's config.json against itself: engines read one part of it and decoding here another.

    Raises ValueError for settings that no draft of the folder's target has, and for each field at odds with them.
    """
    target = _target(content, file)
    _check_settings(settings, target, file, again(content))
    wanted = config_fields(target, settings)
    del wanted["settings"]
    wrong = [
        f"{name}: {_told(content, name, 'missing')}, by its settings and target it {_told(wanted, name, 'left out')}"
        for name in (*wanted, *(name for name in MAY_BE_LEFT_OUT if name not in wanted))
        if (name in content) != (name in wanted) or content.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ValueError(f"{file}: {'; '.join(wrong)}; {again(content)}")


def _told(fields: dict[str, Any], name: str, absent: str) -> str:
    return f"is {fields[name]!r}" if name in fields else f"is {absent}"


def _target(content: dict[str, Any], file: Path) -> Any:
    """The folder's own target, as far as config_fields asks. Raises ValueError for a field that no target has so."""
    target = content["target"]
    rope = target.get("rope_parameters")
    for name, fits, kind in (
        ("model_type", isinstance(target.get("model_type"), str), "a text"),
        *((name, type(target.get(name)) is int and target[name] >= 1, "a number of the target's") for name in COUNTS),
        ("rms_norm_eps", isinstance(target.get("rms_norm_eps"), int | float), "a number of the target's"),
        ("rope_parameters", isinstance(rope, dict) and {"rope_theta", "rope_type"} <= rope.keys(), "the target's rotation"),
    ):
        if not fits:
            raise ValueError(f"{file}: target: {name}: {_told(target, name, 'missing')}, must be {kind}; {again(content)}")
    missing = [name for name in NOT_STORED if name not in content]
    if missing:
        raise ValueError(f"{file}: {', '.join(missing)}: is missing, must be as the target's; {again(content)}")
    beside = {name: content[name] for name in NOT_STORED}
    return SimpleNamespace(**{"head_dim": None} | target | beside | {"dtype": content.get("dtype")})


def _check_settings(settings: Settings, target: Any, file: Path, advice: str) -> None:
    check_shape({name: getattr(settings, name) for name in SHAPE}, f"{file}: settings")
    layers, last = list(settings.layers or ()), target.num_hidden_layers - 1
    if len(layers) != AUXILIARY or layers != sorted({layer for layer in layers if 0 <= layer <= last}):
        raise ValueError(
            f"{file}: settings: layers: is {layers}, must be {AUXILIARY} of the target's layers 0 to {last}, ascending; "
            f"{advice}"
        )
    if settings.vocabulary is not None and settings.vocabulary > target.vocab_size:
        told = f"is {settings.vocabulary}, the target has {target.vocab_size} tokens"
        raise ValueError(f"{file}: settings: vocabulary: {told}; {advice}")
