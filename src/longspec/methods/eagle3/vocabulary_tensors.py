"""A draft vocabulary as the tensors of a draft folder: `d2t` and `t2d`.

d2t: int64, for each draft token its target token less its own number; t2d: bool, which of the target's tokens are draft tokens.
Both engines read d2t and pass over t2d (load_weights of llama_eagle3.py in vLLM 0.32 and SGLang 0.5.23); the `speculators`
package needs both. A draft that proposes all of the target's tokens has neither: vLLM then has no place for d2t and refuses
the file.

Shapes: V draft vocabulary, T target's vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

D2T, T2D = "d2t", "t2d"


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
    """The target's tokens that both tensors tell of, which stand in `source`; without its number of tokens, t2d is believed.

    advice: how to come by better ones. Raises ValueError that names the tensor, what it holds and what it must: sizes, and
    ascending tokens of the target.
    """
    for name, dtype, length in ((D2T, torch.int64, vocabulary), (T2D, torch.bool, target_vocabulary)):
        tensor = found.get(name)
        told = "is missing" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)}"
        fits = tensor is not None and tensor.dtype == dtype and tensor.ndim == 1 and length in (None, len(tensor))
        if not fits:
            wanted = "of the target's tokens" if length is None else f"[{length}]"
            raise ValueError(f"{source}: {name}: {told}, must be {dtype} {wanted}; {advice}")
    target_vocabulary = len(found[T2D])
    ids_V = found[D2T] + torch.arange(vocabulary)
    lowest = 0
    for token, own in enumerate(ids_V.tolist()):
        if not lowest <= own < target_vocabulary:
            raise ValueError(
                f"{source}: {D2T}: draft token {token} is the target's {own}, must be one of {lowest} to "
                f"{target_vocabulary - 1}, ascending; {advice}"
            )
        lowest = own + 1
    marked_V = found[T2D].nonzero().flatten()
    if not torch.equal(marked_V, ids_V):
        only = sorted(set(marked_V.tolist()) ^ set(ids_V.tolist()))[0]
        raise ValueError(
            f"{source}: {T2D}: marks {len(marked_V)} tokens, {D2T} names {vocabulary}; token {only} is in one of them; {advice}"
        )
    return tuple(ids_V.tolist())
