"""Whether the weights that a stage begins with are of the draft that it trains.

Shapes: V draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch

from longspec.methods.draft_files import draft_weights_file, read_draft_config
from longspec.methods.eagle3.settings import Settings, layers_of
from longspec.methods.eagle3.weights import D2T, stored_settings
from longspec.models.weight_files import read_tensors


def check_same_draft(config: Any, settings: Settings, weights: Path) -> None:
    """Raise ValueError, naming both, where weights are of a draft that reads, feeds back or says something else.

    Tensors that are missing or of another shape are not looked at here.
    """
    if read_draft_config(weights) is not None:
        stored = stored_settings(weights)
        layers = [list(layers_of(each.layers, config.num_hidden_layers)) for each in (stored, settings)]
        for name, theirs, wanted in (("layers", *layers), ("norm_output", stored.norm_output, settings.norm_output)):
            if theirs != wanted:
                raise ValueError(f"{weights}: settings: {name}: {theirs}, recipe.method.{name} is {wanted}; give the same")
    file = draft_weights_file(weights)
    d2t_V = read_tensors(file).get(D2T)
    if d2t_V is None or settings.ids is None:
        return
    found, wanted_ids = (d2t_V + torch.arange(len(d2t_V))).tolist(), list(settings.ids)
    if found != wanted_ids:
        common = len(set(found) & set(wanted_ids))
        raise ValueError(
            f"{file}: {D2T}: this draft says {len(found)} tokens, the draft vocabulary of --vocabulary has {len(wanted_ids)}, "
            f"{common} are in both; all stages need one vocabulary: name the other run as recipe.method.vocabulary_from"
        )
