"""Figures of chosen prompts with their intervals, by resampling the records, and differences between drafters on them.

Suffixes: P prompts, N records, R resamples. An acceptance length is sum(new tokens) / sum(rounds). The record is the unit
that is drawn, not the round or the prompt: the rounds of one prompt, and prompts that are stretches of one record, are not
independent of each other.
"""

from functools import lru_cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from longspec.report.evaluations import Array, Evaluation

RESAMPLES = 10_000
LEVEL = 0.95  # of every interval

FloatArray = npt.NDArray[np.float64]
Sums = tuple[npt.ArrayLike, npt.ArrayLike]  # over [N] and under [N], of one ratio


def sums_by_record(
    tasks_P: npt.NDArray[np.generic], records_P: npt.NDArray[np.generic], *columns_P: npt.NDArray[np.generic]
) -> tuple[npt.NDArray[np.generic], list[FloatArray]]:
    """The task of each (task, record) [N], and every column [P] summed over that record's prompts [N]."""
    _, stratum_P = np.unique(tasks_P, return_inverse=True)
    pairs_2P = np.stack([stratum_P, records_P])
    _, first_N, number_P = np.unique(pairs_2P, axis=1, return_index=True, return_inverse=True)
    sums = [np.asarray(np.bincount(number_P.ravel(), weights=column_P), float) for column_P in columns_P]
    return tasks_P[first_N], sums


def draws(strata_N: npt.NDArray[np.generic], seed: int, resamples: int = RESAMPLES) -> FloatArray:
    """How often each resample draws each record, [R, N], read-only; every stratum (task) keeps its number of records."""
    _, stratum_N = np.unique(strata_N, return_inverse=True)
    return _draws(tuple(stratum_N.tolist()), seed, resamples)


@lru_cache(maxsize=4)  # many drafters are measured on the same records
def _draws(stratum_N: tuple[int, ...], seed: int, resamples: int) -> FloatArray:
    rng = np.random.default_rng(seed)
    counts_RN = np.zeros((resamples, len(stratum_N)))
    for stratum in range(max(stratum_N) + 1):
        (members_M,) = np.nonzero(np.array(stratum_N) == stratum)
        size = len(members_M)
        counts_RN[:, members_M] = rng.multinomial(size, np.full(size, 1 / size), size=resamples)
    counts_RN.flags.writeable = False
    return counts_RN


def estimate(*ratios: Sums, seed: int, strata_N: npt.ArrayLike | None = None, resamples: int = RESAMPLES) -> dict[str, float]:
    """`mean`, sum(over) / sum(under) over records, and the ends of its interval, `low` and `high`.

    Of two ratios it is the first less the second, of the same records, drawn together. strata_N: the task of each record. Each
    record has something to divide by: a resample could hold no other. Raises ValueError without records.
    """
    pairs = [(np.asarray(over_N, float), np.asarray(under_N, float)) for over_N, under_N in ratios]
    records = len(pairs[0][0])
    if records == 0:
        raise ValueError("a ratio over 0 records has nothing to divide by; evaluate more prompts")
    assert all(len(over_N) == records and np.all(under_N > 0) for over_N, under_N in pairs)
    counts_RN = draws(np.zeros(records, int) if strata_N is None else np.asarray(strata_N), seed, resamples)
    mean = reduce(np.subtract, [over_N.sum() / under_N.sum() for over_N, under_N in pairs])
    statistic_R = reduce(np.subtract, [counts_RN @ over_N / (counts_RN @ under_N) for over_N, under_N in pairs])
    low, high = np.quantile(statistic_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": float(mean), "low": float(low), "high": float(high)}


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
