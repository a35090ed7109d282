"""Intervals for ratios of sums over held-out records, by resampling the records.

Suffixes: P prompts, N records, R resamples. An acceptance length is sum(new tokens) / sum(rounds). The record is the unit
that is drawn, not the round or the prompt: the rounds of one prompt, and prompts that are stretches of one record, are not
independent of each other.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
LEVEL = 0.95

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval, in the figure's own unit."""

    mean: float
    low: float
    high: float


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


def _interval(mean: float, statistic_R: FloatArray, level: float) -> Estimate:
    """The percentile interval of a resampled statistic, beside the value of the whole sample."""
    low, high = np.quantile(statistic_R, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(mean), float(low), float(high))


def _ratio_R(counts_RN: FloatArray, over_N: FloatArray, under_N: FloatArray) -> FloatArray:
    """The ratio of sums in each resample. Raises ValueError for a record with no denominator: resamples could hold no other."""
    if not np.all(under_N > 0):
        raise ValueError(f"{np.sum(under_N <= 0)} of {len(under_N)} records have nothing to divide by; leave them out")
    return np.asarray(counts_RN @ over_N / (counts_RN @ under_N))


def ratio(
    over_N: npt.ArrayLike,
    under_N: npt.ArrayLike,
    *,
    seed: int,
    strata_N: npt.ArrayLike | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Estimate:
    """sum(over) / sum(under) over records, with its interval. Raises ValueError without records or a record's denominator."""
    over_N, under_N = np.asarray(over_N, float), np.asarray(under_N, float)
    if len(over_N) == 0:
        raise ValueError("a ratio over 0 records has nothing to divide by; evaluate more prompts")
    strata_N = np.zeros(len(over_N), int) if strata_N is None else np.asarray(strata_N)
    counts_RN = draws(strata_N, seed, resamples)
    return _interval(over_N.sum() / under_N.sum(), _ratio_R(counts_RN, over_N, under_N), level)


def paired_difference(
    new: tuple[npt.ArrayLike, npt.ArrayLike],
    old: tuple[npt.ArrayLike, npt.ArrayLike],
    *,
    seed: int,
    strata_N: npt.ArrayLike | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Ratio of `new` minus ratio of `old`, each (over [N], under [N]) of the same records, drawn together."""
    (new_over_N, new_under_N), (old_over_N, old_under_N) = (
        (np.asarray(over, float), np.asarray(under, float)) for over, under in (new, old)
    )
    if len(new_over_N) != len(old_over_N) or len(new_over_N) == 0:
        raise ValueError(f"{len(new_over_N)} and {len(old_over_N)} records are no pairs; evaluate both on the same")
    strata_N = np.zeros(len(new_over_N), int) if strata_N is None else np.asarray(strata_N)
    counts_RN = draws(strata_N, seed, resamples)
    mean = new_over_N.sum() / new_under_N.sum() - old_over_N.sum() / old_under_N.sum()
    difference_R = _ratio_R(counts_RN, new_over_N, new_under_N) - _ratio_R(counts_RN, old_over_N, old_under_N)
    return _interval(mean, difference_R, level)
