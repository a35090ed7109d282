"""What a draft learns of its target, of the tensors that were handed out: hidden states for the head, or likeliest tokens.

Shapes: B rows, S tokens, N tokens that have a label, H hidden width, V draft vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

from longspec.models.teachers import SparseTeacher, draft_numbers
from longspec.states.tensors import BEST_TOKEN, NEXT_LOG_PROB, TOP_LOG_PROBS, TOP_TOKENS


def sparse_teacher(
    found: dict[str, Tensor], labelled: Callable[[Tensor], Tensor], ids_V: Tensor | None, *, with_loss: bool
) -> SparseTeacher | None:
    """The teacher of stored likeliest tokens; None where the final hidden states were handed out.

    labelled: takes [B, S, ...] to [N, ...]; ids_V: the draft vocabulary, None = all tokens; with_loss: the target's own loss is
    wanted. Raises ValueError for tokens that the draft vocabulary has not: they were made for another one.
    """
    if TOP_TOKENS not in found:
        return None
    tokens_Nk = draft_numbers(labelled(found[TOP_TOKENS]), ids_V)
    if ids_V is not None and bool((tokens_Nk < 0).any()):
        raise ValueError(
            f"{TOP_TOKENS}: the stored states hold tokens outside this draft's vocabulary of {len(ids_V)}; build the states "
            "with this run's draft vocabulary"
        )
    return SparseTeacher(
        tokens_Nk,
        labelled(found[TOP_LOG_PROBS]),
        draft_numbers(labelled(found[BEST_TOKEN]), ids_V),
        labelled(found[NEXT_LOG_PROB]) if with_loss else None,
    )
