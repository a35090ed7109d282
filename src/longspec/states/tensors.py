"""Name the tensors that a draft may read of its frozen target, with their shapes, whether from a forward or from a file.

    embedded            the token's embedding                                    [B, S, H]
    cos, sin            the target's rotations at the token's position           [B, S, R] each
    keys.7, values.7    of layer 7's self attention, keys after the rotation     [B, K, S, D] each
    hidden.7            the input of layer 7, `hidden_states[7]` of transformers [B, S, H]
    final               after the final norm, as the head reads it               [B, S, H]

States with the k likeliest tokens of the target's distributions have these tensors instead of `final`. The distribution is the
one that the method learns (Method.learnt): over its draft vocabulary if it has one, at its labels' temperature.

    top_tokens          the target's tokens, likeliest first, int32              [B, S, k]
    top_log_probs       their log-probabilities, float16                         [B, S, k]
    log_sum_exp         what was subtracted from logits / temperature, float32   [B, S]
    best_token          the most likely of all the target's tokens, int32        [B, S]
    next_log_prob       of the row's next token, over all tokens, float32        [B, S]

States in float8 have best_token next to `final`.

Shapes: B rows, S tokens, N tokens that have a label, H hidden width, K key/value heads, D head width, R the part of a head that
is rotated, V draft vocabulary, k likeliest tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from longspec.models.target import head_width
from longspec.models.teachers import DenseTeacher, SparseTeacher, Teacher, draft_numbers

EMBEDDED, COS, SIN, FINAL = "embedded", "cos", "sin", "final"
KEYS, VALUES, HIDDEN = "keys.", "values.", "hidden."
TOP_TOKENS, TOP_LOG_PROBS, LOG_SUM_EXP = "top_tokens", "top_log_probs", "log_sum_exp"
BEST_TOKEN, NEXT_LOG_PROB = "best_token", "next_log_prob"
TOP = (TOP_TOKENS, TOP_LOG_PROBS, LOG_SUM_EXP, BEST_TOKEN, NEXT_LOG_PROB)


def token_shape(config: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one token's part of a tensor that a method reads. config: of the target."""
    in_heads = name.startswith((KEYS, VALUES))
    return (config.num_key_value_heads, head_width(config)) if in_heads else (config.hidden_size,)


def layer_of(name: str) -> int:
    """Return the layer of one of these tensors."""
    return int(name.partition(".")[2])


def layers_of(names: Iterable[str], *kinds: str) -> set[int]:
    """Return the layers of the names of these kinds, such as {2, 16} for hidden.2 and hidden.16."""
    return {layer_of(name) for name in names if name.startswith(kinds)}


def teacher_of(
    found: dict[str, Tensor],
    labelled: Callable[[Tensor], Tensor],
    weight_TH: Tensor,
    labels_N: Tensor,
    ids_V: Tensor | None,
    *,
    with_loss: bool,
    temperature: float = 1.0,
) -> Teacher | None:
    """Return the target's side of a loss, from its final hidden states or its likeliest tokens; None if neither was read.

    labelled: takes [B, S, ...] to [N, ...]; weight_TH: the target's head; ids_V: the draft vocabulary, None = all tokens;
    with_loss: the target's own loss is wanted.
    """
    kept = {name: labelled(found[name]) for name in (FINAL, *TOP) if name in found}
    if TOP_TOKENS in kept:
        tokens_Nk, best_N = draft_numbers(kept[TOP_TOKENS], ids_V), draft_numbers(kept[BEST_TOKEN], ids_V)
        return SparseTeacher(tokens_Nk, kept[TOP_LOG_PROBS], best_N, kept[NEXT_LOG_PROB] if with_loss else None, temperature)
    if FINAL not in kept:
        return None
    return DenseTeacher(kept[FINAL], weight_TH, labels_N, ids_V, with_loss, kept.get(BEST_TOKEN), temperature)
