"""Store a draft vocabulary as tensors next to a draft's weights, under the names that engines load.

There are two tensors. d2t: int64, for each draft token its target token minus its own number; t2d: bool, which of the target's
tokens are draft tokens. vLLM 0.32 and SGLang 0.5.23 both read d2t and skip t2d (load_weights of their draft models); the
`speculators` package needs both. A draft that proposes all of the target's tokens has neither: vLLM then has no place for d2t
and refuses the file.

Shapes: V draft vocabulary, T target's vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

D2T, T2D = "d2t", "t2d"


def vocabulary_tensors(ids: Sequence[int], target_vocabulary: int) -> dict[str, Tensor]:
    """Return d2t and t2d for ascending tokens of the target; {} if these are all of its tokens."""
    if len(ids) == target_vocabulary:
        return {}
    ids_V, t2d_T = torch.tensor(ids), torch.zeros(target_vocabulary, dtype=torch.bool)
    t2d_T[ids_V] = True
    return {D2T: ids_V - torch.arange(len(ids_V)), T2D: t2d_T}


def ids_of(
    found: Mapping[str, Tensor], vocabulary: int, target_vocabulary: int | None, source: object, advice: str
) -> tuple[int, ...]:
    """Return the target's tokens that d2t in `source` names. vocabulary: their number.

    target_vocabulary: None if unknown; advice: what to do about a wrong file. Raises ValueError that names the tensor and what
    it holds, unless it is int64 [V] and its tokens ascend within the target's.
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
