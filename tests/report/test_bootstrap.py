"""The intervals against known distributions, closed forms and a plain resampling loop."""

import numpy as np
import pytest

from longspec.report.estimates import draws, estimate, sums_by_record


def test_the_interval_covers_a_known_mean_at_its_level() -> None:
    """400 samples of 48 exponential records (mean 1): a 95 % interval may miss at most 10 % (percentile: about 6.5 %).

    With a true miss rate of 6.5 % the bounds 3 % and 10 % are each crossed with a probability below 0.4 %; the seed is fixed.
    """
    rng = np.random.default_rng(1)
    trials = 400
    missed = 0
    for trial in range(trials):
        over_N = rng.exponential(1.0, 48)
        found = estimate((over_N, np.ones(48)), seed=trial, resamples=1000)
        missed += not found["low"] <= 1.0 <= found["high"]
    assert 0.03 <= missed / trials <= 0.10


def test_no_improvement_is_rarely_called_one() -> None:
    """Two drafters of equal skill: the lower end lies above 0 in at most 6 % of 400 trials (nominal 2.5 %)."""
    rng = np.random.default_rng(2)
    rounds_N = np.full(48, 40.0)
    called = 0
    for trial in range(400):
        hard_N = rng.normal(0, 8, 48)
        new_N, old_N = (64 + hard_N + rng.normal(0, 3, 48) for _ in range(2))
        called += estimate((new_N, rounds_N), (old_N, rounds_N), seed=trial, resamples=1000)["low"] > 0
    assert 0.005 <= called / 400 <= 0.06


def test_pairing_agrees_with_the_closed_form_and_beats_unpaired() -> None:
    """With equal denominators the bootstrap's standard error is std(difference) / sqrt(N): here to 3 %."""
    rng = np.random.default_rng(3)
    hard_N = rng.normal(0, 10, 200)
    new_N, old_N = 70 + hard_N + rng.normal(0, 1, 200), 64 + hard_N + rng.normal(0, 1, 200)
    ones_N = np.ones(200)
    found = estimate((new_N, ones_N), (old_N, ones_N), seed=0)
    error = np.std(new_N - old_N) / np.sqrt(200)
    assert found["mean"] == pytest.approx(np.mean(new_N - old_N))
    assert found["low"] == pytest.approx(found["mean"] - 1.96 * error, abs=0.06 * error)
    assert found["high"] == pytest.approx(found["mean"] + 1.96 * error, abs=0.06 * error)
    unpaired = np.sqrt(np.var(new_N) + np.var(old_N)) / np.sqrt(200)
    assert found["high"] - found["low"] < unpaired


def test_the_ratio_agrees_with_a_plain_loop() -> None:
    """Resampling written out with np.random.choice gives the same interval to Monte Carlo error."""
    rng = np.random.default_rng(4)
    rounds_N = rng.integers(20, 60, 30)
    new_N = rounds_N + rng.binomial(rounds_N, 0.6)
    loop = []
    for _ in range(4000):
        picked_N = rng.choice(30, 30)
        loop.append(new_N[picked_N].sum() / rounds_N[picked_N].sum())
    found = estimate((new_N, rounds_N), seed=0)
    assert found["mean"] == new_N.sum() / rounds_N.sum()
    width = found["high"] - found["low"]
    assert np.abs(np.quantile(loop, [0.025, 0.975]) - [found["low"], found["high"]]).max() < 0.06 * width


def test_strata_keep_their_sizes_and_seeds_repeat() -> None:
    strata_N = np.array(["a"] * 3 + ["b"] * 5)
    counts_RN = draws(strata_N, seed=7, resamples=50)
    assert (counts_RN[:, :3].sum(1) == 3).all()
    assert (counts_RN[:, 3:].sum(1) == 5).all()
    assert (counts_RN == draws(strata_N, seed=7, resamples=50)).all()
    assert (counts_RN != draws(strata_N, seed=8, resamples=50)).any()


def test_records_of_one_task_are_summed_and_those_of_another_are_not() -> None:
    tasks_P, records_P = np.array(["b", "a", "b", "a", "b"]), np.array([7, 7, 3, 7, 7])
    tasks_N, (over_N, under_N) = sums_by_record(tasks_P, records_P, np.array([1, 2, 4, 8, 16]), np.ones(5))
    found = sorted(zip(tasks_N.tolist(), over_N.tolist(), under_N.tolist(), strict=True))
    assert found == [("a", 10.0, 2.0), ("b", 4.0, 1.0), ("b", 17.0, 2.0)]


def test_prompts_of_one_record_carry_no_more_than_the_record() -> None:
    """20 records, 6 prompts each that share the record's skill: 200 intervals over records miss it as rarely as they should.

    Over prompts, taken as independent, they miss it in more than a quarter of the trials.
    """
    rng = np.random.default_rng(5)
    records_P, tasks_P = np.repeat(np.arange(20), 6), np.zeros(120, int)
    missed = {"records": 0, "prompts": 0}
    for trial in range(200):
        over_P = 2 + np.repeat(rng.normal(0, 1, 20), 6) + rng.normal(0, 0.3, 120)
        _, (over_N, under_N) = sums_by_record(tasks_P, records_P, over_P, np.ones(120))
        for unit, (over, under) in {"records": (over_N, under_N), "prompts": (over_P, np.ones(120))}.items():
            found = estimate((over, under), seed=trial, resamples=1000)
            missed[unit] += not found["low"] <= 2.0 <= found["high"]
    assert missed["records"] <= 25
    assert missed["prompts"] > 50


def test_nothing_to_divide_by_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 records"):
        estimate(([], []), seed=0)
