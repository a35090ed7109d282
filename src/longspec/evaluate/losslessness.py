"""Is speculative output the target's own? Token by token against plain decoding, every difference judged."""

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
    """Compare up to and including the first difference: after it the two texts are different texts.

    A mismatch is a near-tie when plain decoding's own logits gave the other token as much as the best one, up to the
    rounding noise of the dtype.
    """
    for place, (left, right) in enumerate(zip(plain.ids, speculative, strict=False)):
        if left != right:
            logits_V = plain.logits[place]
            margin, allowed = float(logits_V[left] - logits_V[right]), near_tie_margin(logits_V)
            return Comparison(place + 1, 1, int(margin <= allowed), margin, allowed)
    differs = len(speculative) != len(plain.ids)
    return Comparison(min(len(plain.ids), len(speculative)), int(differs), 0)
