"""EAGLE-3 weights under the names that engines load, and the settings that a draft folder holds.

Shapes: V draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspec.methods.draft_files import draft_weights_file, read_draft_config
from longspec.methods.eagle3.settings import Settings
from longspec.methods.layer_state import check_state as check_layer_state
from longspec.models.weight_files import read_tensors

D2T, T2D = "d2t", "t2d"


def published(state: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The state dict, and of a reduced vocabulary each draft token's distance to the target's token."""
    vocabulary = {}
    if settings.ids is not None:
        ids_V = torch.tensor(settings.ids)
        vocabulary[D2T] = ids_V - torch.arange(len(ids_V))
    return dict(sorted((state | vocabulary).items()))


def config_fields(config: Any, settings: Settings) -> dict[str, Any]:
    """None so far."""
    return {}


def check_state(layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
    """Raise ValueError as of layer_state.check_state; the vocabulary is no weight."""
    check_layer_state(layer, {name: tensor for name, tensor in state.items() if name not in (D2T, T2D)}, source)


def load(layer: nn.Module, path: Path) -> None:
    """Fill a layer. Raises ValueError as of check_state."""
    file = draft_weights_file(path)
    state = read_tensors(file)
    check_state(layer, state, file)
    layer.load_state_dict({name: tensor for name, tensor in state.items() if name not in (D2T, T2D)})


def stored_settings(path: Path) -> Settings:
    """As a draft folder's config.json holds them."""
    found = read_draft_config(path)
    if found is None:
        raise ValueError(f"{path}: a file of weights says nothing of its draft's layers; give a draft folder")
    settings = dict(found[1]["settings"])
    layers = settings.pop("layers", None)
    d2t = read_tensors(draft_weights_file(path)).get(D2T)
    ids = None if d2t is None else tuple((d2t + torch.arange(len(d2t))).tolist())
    return Settings(**settings, layers=None if layers is None else tuple(layers), ids=ids)
