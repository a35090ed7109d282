"""Figures of chosen prompts with their intervals, and differences between drafters on them.

Acceptance length = sum(new tokens) / sum(rounds) over prompts; intervals are over records. Suffixes: P prompts, N records.
"""

from typing import Any

import numpy as np

from longspec.evaluate.bootstrap import estimate, sums_by_record
from longspec.report.evaluations import Array, Evaluation

FEWEST = 5  # records for an interval: resampling fewer says little


def drafted(chosen_P: Array, *found: Evaluation) -> Array:
    """The chosen prompts, [P] boolean, of which every drafter had a round.

    A text that its first token ends has none. It adds nothing to a ratio, so a record of such texts alone must neither be
    drawn, where a resample could hold no other, nor count as one that an interval rests on.
    """
    return chosen_P & np.all([one["rounds"] > 0 for one in found], axis=0)


def ratio_of(found: Evaluation, over: str, under: str, chosen_P: Array, seed: int) -> dict[str, Any]:
    """Ratio of two columns' sums over the chosen prompts, [P] boolean; no interval below FEWEST records."""
    return _estimate([(found, over, under)], chosen_P, seed)


def _estimate(ratios: list[tuple[Evaluation, str, str]], chosen_P: Array, seed: int) -> dict[str, Any]:
    """One ratio of sums, or the first less the second."""
    inside_P = drafted(chosen_P, *(found for found, _, _ in ratios))
    first, columns = ratios[0][0], [found[name][inside_P] for found, *names in ratios for name in names]
    tasks_N, sums = sums_by_record(first["task"][inside_P], first["record"][inside_P], *columns)
    found: dict[str, Any] = estimate(*zip(sums[::2], sums[1::2], strict=True), seed=seed, strata_N=tasks_N)
    return found if len(tasks_N) >= FEWEST else found | {"low": None, "high": None}


def acceptance(found: Evaluation, chosen_P: Array, seed: int) -> dict[str, Any]:
    """Acceptance length of the chosen prompts, [P] boolean, with how much it rests on."""
    inside_P = drafted(chosen_P, found)
    tasks_N, (new_N,) = sums_by_record(*(found[name][inside_P] for name in ("task", "record", "new_tokens")))
    counts = {"prompts": int(chosen_P.sum()), "tokens": int(new_N.sum()), "documents": len(tasks_N)}
    return ratio_of(found, "new_tokens", "rounds", chosen_P, seed) | counts


def difference(new: Evaluation, old: Evaluation, chosen_P: Array, seed: int) -> dict[str, Any]:
    """Paired difference in acceptance length; `improved`: its whole interval lies above 0."""
    found = _estimate([(one, "new_tokens", "rounds") for one in (new, old)], chosen_P, seed)
    improved = None if found["low"] is None else found["low"] > 0
    return {"difference": found["mean"], "low": found["low"], "high": found["high"], "improved": improved}
