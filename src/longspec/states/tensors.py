"""Names and shapes of what a draft may read of its frozen target, whether it comes from a forward or from a file.

    embedded            the token's embedding                                    [B, S, H]
    cos, sin            the target's rotations at the token's position           [B, S, R] each
    keys.7, values.7    of layer 7's self attention, keys after the rotation     [B, K, S, D] each
    hidden.7            the input of layer 7, `hidden_states[7]` of transformers [B, S, H]
    final               after the final norm, as the head reads it               [B, S, H]

States that hold the k likeliest tokens of the target's distributions hand out these in the place of `final`. The distribution
is the one that the method learns (Method.learnt): over its draft vocabulary where it has one, at its labels' temperature.

    top_tokens          the target's tokens, likeliest first, int32              [B, S, k]
    top_log_probs       their log-probabilities, float16                         [B, S, k]
    log_sum_exp         what was subtracted from logits / temperature, float32   [B, S]
    best_token          the most likely of all the target's tokens, int32        [B, S]
    next_log_prob       of the row's next token, over all tokens, float32        [B, S]

States in float8 hand out best_token beside `final`.

Shapes: B rows, S tokens, N tokens that have a label, H hidden width, K key/value heads, D head width, R the part of a head that
is rotated, V draft vocabulary, k likeliest tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from longspec.models.target import head_width
from longspec.models.teachers import SparseTeacher, draft_numbers

EMBEDDED, COS, SIN, FINAL = "embedded", "cos", "sin", "final"
KEYS, VALUES, HIDDEN = "keys.", "values.", "hidden."
TOP_TOKENS, TOP_LOG_PROBS, LOG_SUM_EXP = "top_tokens", "top_log_probs", "log_sum_exp"
BEST_TOKEN, NEXT_LOG_PROB = "best_token", "next_log_prob"
TOP = (TOP_TOKENS, TOP_LOG_PROBS, LOG_SUM_EXP, BEST_TOKEN, NEXT_LOG_PROB)


@dataclass(frozen=True)
class StateTensor:
    """One tensor that a method reads: its name and the shape of one token's part, in the target's dtype."""

    name: str
    token_shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of one token."""
        return prod(self.token_shape)


def keys_and_values(config: Any, layer: int) -> tuple[StateTensor, StateTensor]:
    """The self attention's keys and values of one layer of the target whose configuration this is."""
    shape = (config.num_key_value_heads, head_width(config))
    return StateTensor(f"{KEYS}{layer}", shape), StateTensor(f"{VALUES}{layer}", shape)


def hidden_states(config: Any, layer: int) -> StateTensor:
    """The input of one layer."""
    return StateTensor(f"{HIDDEN}{layer}", (config.hidden_size,))


def final_hidden_states(config: Any) -> StateTensor:
    """The hidden states that the target's head reads."""
    return StateTensor(FINAL, (config.hidden_size,))


def layers_of(names: Iterable[str], kind: str) -> set[int]:
    """The layers of which tensors of a kind are among the names, such as {2, 16} of hidden.2 and hidden.16."""
    return {int(name.removeprefix(kind)) for name in names if name.startswith(kind)}


def layer_of(name: str) -> int:
    """The layer of one of these tensors."""
    return int(name.partition(".")[2])


def sparse_teacher(
    found: dict[str, Tensor],
    labelled: Callable[[Tensor], Tensor],
    ids_V: Tensor | None,
    *,
    with_loss: bool,
    temperature: float = 1.0,
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
        temperature,
    )
