"""A draft vocabulary as tensors beside a draft's weights, under the names that engines load, and the settings of such a draft.

Two tensors. d2t: int64, for each draft token its target token less its own number; t2d: bool, which of the
target's tokens are draft tokens. Both vLLM 0.32 and SGLang 0.5.23 read d2t and pass over t2d (load_weights of their
draft models); the `speculators` package needs both. A draft that proposes all of the target's tokens has neither: vLLM then
has no place for d2t and refuses the file.

Shapes: V draft vocabulary, T target's vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from longspec.methods.draft_files import AGAIN, draft_weights_file, read_draft_config, stored_settings
from longspec.methods.layer_shape import LayerSettings
from longspec.models.weight_files import check_state, read_tensors

D2T, T2D = "d2t", "t2d"
Settings = TypeVar("Settings", bound=LayerSettings)


def vocabulary_tensors(ids: Sequence[int], target_vocabulary: int) -> dict[str, Tensor]:
    """Both tensors, of ascending tokens of the target; none where these are all of its tokens."""
    if len(ids) == target_vocabulary:
        return {}
    ids_V, t2d_T = torch.tensor(ids), torch.zeros(target_vocabulary, dtype=torch.bool)
    t2d_T[ids_V] = True
    return {D2T: ids_V - torch.arange(len(ids_V)), T2D: t2d_T}


def ids_of(
    found: Mapping[str, Tensor], vocabulary: int, target_vocabulary: int | None, source: object, advice: str
) -> tuple[int, ...]:
    """Return the target's tokens that d2t names, which stands in `source`.

    target_vocabulary: None where it is not known; advice: how to come by better ones. Raises ValueError that names the tensor,
    what it holds and what it must: sizes, and ascending tokens of the target.
    """
    d2t_V = found.get(D2T)
    if d2t_V is None or d2t_V.shape != (vocabulary,) or d2t_V.dtype != torch.int64:
        told = "is missing" if d2t_V is None else f"is {d2t_V.dtype} {list(d2t_V.shape)}"
        raise ValueError(f"{source}: {D2T}: {told}, must be {torch.int64} [{vocabulary}]; {advice}")
    ids_V, most = d2t_V + torch.arange(vocabulary), (target_vocabulary or torch.iinfo(torch.int64).max) - 1
    least_V = torch.cat([torch.zeros(1, dtype=torch.int64), ids_V[:-1] + 1])
    wrong = ((ids_V < least_V) | (ids_V > most)).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(
            f"{source}: {D2T}: draft token {token} is the target's {int(ids_V[token])}, must be one of {int(least_V[token])} "
            f"to {most}, ascending; {advice}"
        )
    return tuple(ids_V.tolist())


def with_vocabulary(state: dict[str, Tensor], settings: LayerSettings) -> dict[str, Tensor]:
    """The layer's own names, with d2t and t2d where some of the target's tokens are proposed and they are known."""
    if settings.ids is not None:
        assert settings.target_vocabulary is not None, "ids come with the size of the vocabulary that they are chosen from"
        state = state | vocabulary_tensors(settings.ids, settings.target_vocabulary)
    return dict(sorted(state.items()))


def check_with_vocabulary(
    layer: nn.Module, state: dict[str, Tensor], source: object, hints: Mapping[str, str] | None = None
) -> None:
    """Raise ValueError as of check_state, and for a file with a d2t or t2d of another draft vocabulary, or without them.

    A checkpoint has neither, and is held against a layer without numbers. hints: what else may be at fault, by a part of the
    name of a tensor that is missing or unknown.
    """
    weights = {name: tensor for name, tensor in state.items() if name not in (D2T, T2D)}
    strange = layer.state_dict().keys() ^ weights.keys()
    hint = "".join(told for name, told in (hints or {}).items() if name in str(strange))
    check_state(layer, weights, source, hint=hint)
    own_V = layer.ids_V
    assert own_V is None or isinstance(own_V, Tensor)
    if own_V is None or own_V.is_meta:
        return
    own_V = own_V.cpu()
    proposes_first = torch.equal(own_V, torch.arange(len(own_V)))  # which a file need not say
    if len(weights) == len(state) and proposes_first:
        return
    found_V = torch.tensor(ids_of(state, len(own_V), None, source, AGAIN))
    if not torch.equal(found_V, own_V):
        raise ValueError(
            f"{source}: {D2T}: names other tokens than this draft's vocabulary; give a draft of the same vocabulary, or take "
            "its run's by recipe.method.vocabulary_from"
        )


def draft_settings(path: str | Path, name: str, schema: type[Settings]) -> Settings:
    """Return the settings of a draft folder of the method of this name, its tokens from d2t.

    Raises ValueError with file, key and both values where they are strange.
    """
    found, settings = read_draft_config(path, name), stored_settings(path, schema)
    if found is None or settings is None:
        raise ValueError(
            f"{path}: has no config.json of a draft beside it, and does not tell its settings; give a draft folder"
        )
    tokens = found[1]["target"]["vocab_size"]
    if settings.vocabulary not in (None, tokens):
        file = draft_weights_file(path)
        ids = ids_of(read_tensors(file, lambda key: key == D2T), settings.vocabulary, tokens, file, AGAIN)
        return replace(settings, ids=ids, target_vocabulary=tokens)
    return settings if settings.vocabulary is None else replace(settings, ids=tuple(range(tokens)), target_vocabulary=tokens)
