"""Compute figures of chosen prompts with their intervals, and differences between drafters on these prompts.

Suffixes: P prompts, N records. An acceptance length is sum(new tokens) / sum(rounds). The record is the unit of an interval,
not the round or the prompt: the rounds of one prompt, and prompts that are stretches of one record, are not independent of
each other.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse.csgraph import connected_components
from scipy.special import stdtrit

from longspec.measure.lines import Array, Evaluation

LEVEL = 0.95  # confidence of every interval
FEWEST = 8  # records an interval needs: with fewer, too many intervals miss (benchmarks/interval_coverage.py)

FloatArray = npt.NDArray[np.float64]
Sums = tuple[npt.ArrayLike, npt.ArrayLike]  # numerators [N] and denominators [N] of one ratio
Row = dict[str, Any]


def sums_by_record(
    tasks_P: npt.NDArray[np.generic], records_P: npt.NDArray[np.generic], *columns_P: npt.NDArray[np.generic]
) -> tuple[npt.NDArray[np.generic], list[FloatArray]]:
    """Return the index of each (task, record)'s first prompt [N], and every column [P] summed over the record's prompts [N]."""
    _, stratum_P = np.unique(tasks_P, return_inverse=True)
    pairs_2P = np.stack([stratum_P, records_P])
    _, first_N, number_P = np.unique(pairs_2P, axis=1, return_index=True, return_inverse=True)
    sums = [np.asarray(np.bincount(number_P.ravel(), weights=column_P), float) for column_P in columns_P]
    return first_N, sums


def estimate(*ratios: Sums, strata_N: npt.ArrayLike | None = None, texts_N: npt.ArrayLike | None = None) -> dict[str, float]:
    """Return `mean`, sum(over) / sum(under) over records, and the ends of its 95 % interval, `low` and `high`.

    For two ratios, the first minus the second, on the same records. strata_N: each record's task, [N]; texts_N: the number of
    its text from 0, if several tasks share texts. The interval is Student's t over the changes from leaving out one record
    (jackknife: Cochran, Sampling Techniques, 6.17), around each task's mean; changes of records with one text are summed. A
    task of one record has no spread, so its change counts whole. How often the interval covers the truth:
    benchmarks/interval_coverage.py. Raises ValueError without records.
    """
    pairs = [(np.asarray(over_N, float), np.asarray(under_N, float)) for over_N, under_N in ratios]
    records = len(pairs[0][0])
    if records == 0:
        raise ValueError("a ratio over 0 records has nothing to divide by; evaluate more prompts")
    assert all(len(over_N) == records and np.all(under_N > 0) for over_N, under_N in pairs)
    strata = np.zeros(records, int) if strata_N is None else np.asarray(strata_N)
    mean, change_N = 0.0, np.zeros(records)
    for sign, (over_N, under_N) in zip((1, -1), pairs, strict=False):
        ratio = over_N.sum() / under_N.sum()
        others_N = under_N.sum() - under_N if records > 1 else under_N
        mean, change_N = mean + sign * ratio, change_N + sign * (over_N - ratio * under_N) / others_N
    _, stratum_N, size_T = np.unique(strata, return_inverse=True, return_counts=True)
    mean_T, size_N = np.bincount(stratum_N, weights=change_N) / size_T, size_T[stratum_N]
    spread_N = np.where(size_N > 1, (change_N - mean_T[stratum_N]) * np.sqrt(size_N / np.maximum(size_N - 1, 1)), change_N)
    text_N = np.arange(records) if texts_N is None else np.asarray(texts_N)
    of_text = np.bincount(text_N, weights=spread_N)
    holds_TG = np.zeros((len(size_T), len(of_text)))
    holds_TG[stratum_N, text_N] = 1
    apart, _ = connected_components(holds_TG @ holds_TG.T)  # groups of tasks that share no text
    reach = float(stdtrit(max(len(of_text) - apart, 1), (1 + LEVEL) / 2) * np.sqrt(np.square(of_text).sum()))
    return {"mean": float(mean), "low": float(mean - reach), "high": float(mean + reach)}


def drafted(chosen_P: Array, *found: Evaluation) -> Array:
    """Return those of the chosen prompts, [P] boolean, on which every drafter had a round.

    A text that ends at its first token has no round and adds nothing to a ratio. A record of such texts alone must not count
    among the records of an interval.
    """
    return chosen_P & np.all([one["rounds"] > 0 for one in found], axis=0)


def ratio_of(chosen_P: Array, *ratios: tuple[Evaluation, str, str]) -> Row:
    """Return the ratio of two columns' sums over the chosen prompts, [P] boolean; no interval below FEWEST records.

    For two ratios, the first minus the second. `documents`: the number of records with a nonzero denominator. Raises
    ValueError if there are none.
    """
    inside_P = drafted(chosen_P, *(found for found, _, _ in ratios))
    first, columns = ratios[0][0], [found[name][inside_P] for found, *names in ratios for name in names]
    task_P, data_P, record_P = (first[name][inside_P] for name in ("task", "data", "record"))
    first_N, sums = sums_by_record(task_P, record_P, *columns)
    inside_N = np.all([under_N > 0 for under_N in sums[1::2]], axis=0)
    pairs = [(over_N[inside_N], under_N[inside_N]) for over_N, under_N in zip(sums[::2], sums[1::2], strict=True)]
    first_N = first_N[inside_N]
    _, number_N = np.unique(data_P[first_N], return_inverse=True)
    texts_2G, text_N = np.unique(np.stack([number_N, record_P[first_N]]), axis=1, return_inverse=True)
    found: Row = estimate(*pairs, strata_N=task_P[first_N], texts_N=text_N.ravel())
    records = texts_2G.shape[1]
    return (found if records >= FEWEST else found | {"low": None, "high": None}) | {"documents": records}


def too_few(*found: Row) -> str:
    """Return why nothing can be judged if a figure rests on fewer than FEWEST records; otherwise ""."""
    records = min(each["documents"] for each in found)
    few = f"{records} {'record is' if records == 1 else 'records are'} too few to judge by; {FEWEST} are needed"
    return few if records < FEWEST else ""


def acceptance(found: Evaluation, chosen_P: Array) -> Row:
    """Return the acceptance length over the chosen prompts, [P] boolean, with the numbers of records, prompts and tokens."""
    counts = {"prompts": int(chosen_P.sum()), "tokens": int(found["new_tokens"][chosen_P].sum())}
    return ratio_of(chosen_P, (found, "new_tokens", "rounds")) | counts


def difference(new: Evaluation, old: Evaluation, chosen_P: Array, columns: tuple[str, str] = ("new_tokens", "rounds")) -> Row:
    """Return the paired difference, new minus old, in the ratio of two columns; `improved`: its whole interval is above 0."""
    found = ratio_of(chosen_P, (new, *columns), (old, *columns))
    improved = None if found["low"] is None else found["low"] > 0
    return {"difference": found["mean"], "low": found["low"], "high": found["high"], "improved": improved}
