"""Figures of chosen prompts with their intervals, and differences between drafters on them.

Acceptance length = sum(new tokens) / sum(rounds) over prompts; intervals are over records. Suffixes: P prompts, N records.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from longspec.evaluate.bootstrap import paired_difference, ratio, sums_by_record
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
    inside_P = drafted(chosen_P, found)
    tasks_N, (over_N, under_N) = sums_by_record(*(found[name][inside_P] for name in ("task", "record", over, under)))
    if len(tasks_N) < FEWEST:
        return {"mean": float(over_N.sum() / under_N.sum()), "low": None, "high": None}
    return asdict(ratio(over_N, under_N, seed=seed, strata_N=tasks_N))


def acceptance(found: Evaluation, chosen_P: Array, seed: int) -> dict[str, Any]:
    """Acceptance length of the chosen prompts, [P] boolean, with how much it rests on."""
    inside_P = drafted(chosen_P, found)
    tasks_N, (new_N,) = sums_by_record(*(found[name][inside_P] for name in ("task", "record", "new_tokens")))
    counts = {"prompts": int(chosen_P.sum()), "tokens": int(new_N.sum()), "documents": len(tasks_N)}
    return ratio_of(found, "new_tokens", "rounds", chosen_P, seed) | counts


def difference(new: Evaluation, old: Evaluation, chosen_P: Array, seed: int) -> dict[str, Any]:
    """Paired difference in acceptance length; `improved`: its whole interval lies above 0."""
    inside_P = drafted(chosen_P, new, old)
    columns = [found[name][inside_P] for found in (new, old) for name in ("new_tokens", "rounds")]
    tasks_N, sums = sums_by_record(new["task"][inside_P], new["record"][inside_P], *columns)
    new_N, new_rounds_N, old_N, old_rounds_N = sums
    if len(tasks_N) < FEWEST:
        mean = float(new_N.sum() / new_rounds_N.sum() - old_N.sum() / old_rounds_N.sum())
        return {"difference": mean, "low": None, "high": None, "improved": None}
    estimate = paired_difference((new_N, new_rounds_N), (old_N, old_rounds_N), seed=seed, strata_N=tasks_N)
    return {"difference": estimate.mean, "low": estimate.low, "high": estimate.high, "improved": estimate.low > 0}
