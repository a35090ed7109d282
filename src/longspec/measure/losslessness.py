"""Is speculative output the target's own? Token by token against plain decoding, every difference judged."""

from collections.abc import Callable
from dataclasses import dataclass

from longspec.decode.autoregressive import Plain, near_tie_margin


@dataclass(frozen=True)
class Comparison:
    """Tokens compared up to the first difference; a difference is a near-tie or it is a fault.

    margin: how far plain decoding's own logits of the two tokens lie apart; margin_allowed: how far those of a near-tie may.
    None without two tokens that differ.
    """

    tokens_compared: int
    mismatches: int
    near_ties: int
    margin: float | None = None
    margin_allowed: float | None = None


def compare(plain: Plain, speculative: list[int]) -> Comparison:
    """Compare with plain decoding.

    A mismatch is a near-tie when plain decoding's own logits gave the other token as much as the best one, up to the
    rounding noise of the dtype.
    """

    def gap(place: int, own: int, other: int) -> tuple[float, float]:
        logits_V = plain.logits[place]
        return float(logits_V[own] - logits_V[other]), near_tie_margin(logits_V)

    return judge(plain.ids, speculative, gap)


def judge(plain: list[int], speculative: list[int], gap: Callable[[int, int, int], tuple[float, float]]) -> Comparison:
    """Compare two texts up to and including the first difference: after it they are different texts.

    gap: from a place, the plain text's token there and the other one, how far plain decoding's logits of the two lie apart and
    how far those of a near-tie may.
    """
    for place, (left, right) in enumerate(zip(plain, speculative, strict=False)):
        if left != right:
            margin, allowed = gap(place, left, right)
            return Comparison(place + 1, 1, int(margin <= allowed), margin, allowed)
    return Comparison(min(len(plain), len(speculative)), int(len(speculative) != len(plain)), 0)
