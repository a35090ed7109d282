"""The intervals against known distributions and closed forms."""

import numpy as np
import pytest
from scipy import stats

from longspec.measure.estimates import FEWEST, estimate, sums_by_record


@pytest.mark.parametrize(("records", "tasks"), [(FEWEST, 1), (23, 1), (16, 2)])
def test_the_interval_covers_a_known_ratio_at_its_level(records: int, tasks: int) -> None:
    """Also where two tasks ask about the same texts, whose skill is the text's: 17 % would miss if they counted apart.

    1,000 samples of few records whose rounds and skill differ: between 2.5 and 7.5 % of the intervals may miss.

    With a true miss rate of 5 % each bound is crossed with a probability below 0.03 %; a percentile bootstrap misses 12 % at 8.
    """
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(1000):
        rounds_N = rng.integers(20, 60, records).astype(float)
        skill_N, texts_N = np.tile(rng.normal(2.5, 0.5, records), tasks), np.tile(np.arange(records), tasks)
        rounds_N = np.tile(rounds_N, tasks)
        found = estimate((rounds_N * skill_N, rounds_N), strata_N=np.repeat(range(tasks), records), texts_N=texts_N)
        missed += not found["low"] <= 2.5 <= found["high"]
    assert 0.025 <= missed / 1000 <= 0.075


def test_the_ratio_agrees_with_leaving_each_record_out() -> None:
    """The jackknife written as a loop over samples without one record, within each of two tasks."""
    rng = np.random.default_rng(4)
    rounds_N, tasks_N = rng.integers(20, 60, 30).astype(float), np.arange(30) % 2
    new_N = rounds_N + rng.binomial(rounds_N.astype(int), 0.3 + 0.4 * tasks_N)
    without_N = np.array([np.delete(new_N, i).sum() / np.delete(rounds_N, i).sum() for i in range(30)])
    variance = sum(15 * without_N[tasks_N == task].var(ddof=1) for task in (0, 1))
    found = estimate((new_N, rounds_N), strata_N=tasks_N)
    assert found["mean"] == new_N.sum() / rounds_N.sum()
    assert found["high"] - found["mean"] == pytest.approx(stats.t.ppf(0.975, 28) * np.sqrt(variance))


def test_a_task_of_one_record_widens_the_interval() -> None:
    over_N, under_N, tasks_N = np.array([20.0] * 8 + [50.0]), np.full(9, 10.0), np.array([0] * 8 + [1])
    found = estimate((over_N, under_N), strata_N=tasks_N)
    assert found["high"] - found["mean"] > 0.3
    alike = estimate((over_N[:8], under_N[:8]))
    assert (alike["low"], alike["high"]) == (2.0, 2.0)


@pytest.mark.parametrize(("rounds", "most"), [(50.0, 1.1), (103.0, 1.4)])
def test_the_interval_is_as_wide_as_a_bootstrap_within_tasks_says(rounds: float, most: float) -> None:
    """The demo's last stage on the records that choose. Of three long texts one takes 103 rounds, or as many as the others.

    The bootstrap of Rao and Wu (1988): of each task's n records n - 1 are drawn, each counts n / (n - 1) times. Leaving out
    whole a record that holds a quarter of all rounds reaches further.
    """
    over = [[28, 25, 28, 27, 27, 24, 24, 26, 24, 27], [24, 28, 27, 24, 27, 24, 25, 26, 28, 24], [197, 199, 197]]
    under = [[10, 10, 9, 7, 10, 7, 8, 8, 7, 10], [7, 10, 8, 6, 9, 6, 5, 10, 6, 6], [49, 48, rounds]]
    rng, sums_2R = np.random.default_rng(0), np.zeros((2, 10_000))
    for task in zip(over, under, strict=True):
        drawn = rng.integers(len(task[0]), size=(10_000, len(task[0]) - 1))
        sums_2R += [len(column) * np.array(column)[drawn].mean(1) for column in task]
    found = estimate((np.concatenate(over), np.concatenate(under)), strata_N=np.repeat([0, 1, 2], [10, 10, 3]))
    wanted = stats.t.ppf(0.975, 20) * (sums_2R[0] / sums_2R[1]).std()
    assert 1 <= (found["high"] - found["mean"]) / wanted <= most


def test_records_of_one_task_are_summed_and_those_of_another_are_not() -> None:
    tasks_P, records_P = np.array(["b", "a", "b", "a", "b"]), np.array([7, 7, 3, 7, 7])
    first_N, (over_N, under_N) = sums_by_record(tasks_P, records_P, np.array([1, 2, 4, 8, 16]), np.ones(5))
    found = sorted(zip(tasks_P[first_N].tolist(), over_N.tolist(), under_N.tolist(), strict=True))
    assert found == [("a", 10.0, 2.0), ("b", 4.0, 1.0), ("b", 17.0, 2.0)]
