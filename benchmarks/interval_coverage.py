"""How often a report's 95 % interval holds the truth, with few records: python benchmarks/interval_coverage.py

Records are simulated: each has a chance of its own that the target keeps a drafted token (a beta distribution) and a number of
rounds (log-normal), and each round of a chain of four keeps tokens until the first refused one. The truth is the expected
acceptance length, which is known. 2,000 samples of each size; a rate has a standard error of half a per cent. Beside the
report's interval stands the percentile bootstrap over records. Bar: 93 % of what is alike, of three tasks and of paired
differences from FEWEST records on.
"""

import json
from collections.abc import Callable, Iterator

import machine
import numpy as np
import numpy.typing as npt

from longspec.measure.estimates import FEWEST, estimate

DEPTH, SAMPLES, SIZES = 4, 2000, (5, 8, 12, 23, 40)
TASKS = {"alike": [(6, 4)], "three tasks": [(6, 4), (5, 3), (1, 4)], "skewed": [(1, 4)]}  # a, b of the beta distribution
GAIN = 0.05  # by which the second drafter's chance is higher, of a difference
Floats = npt.NDArray[np.float64]


def length(chance_N: Floats) -> Floats:
    """Expected tokens of a round, the target's own included."""
    return np.asarray(sum(chance_N**place for place in range(DEPTH + 1)))


def decode(rng: np.random.Generator, chance: float, rounds: int) -> int:
    """New tokens of so many rounds."""
    return int(np.minimum(rng.geometric(1 - chance, rounds), DEPTH + 1).sum())


def samples(rng: np.random.Generator, tasks: list[tuple[int, int]], size: int, drafters: int) -> Iterator[tuple[list, Floats]]:
    """Yield so often the ratios of one or two drafters on the same records, and each record's task."""
    for _ in range(SAMPLES):
        task_N = np.arange(size) % len(tasks)
        chance_N = np.array([rng.beta(*tasks[task]) for task in task_N])
        ratios = []
        for number in range(drafters):
            chances = np.minimum(chance_N + number * GAIN, 0.98)
            rounds_N = np.maximum(rng.lognormal(3, 0.4, size).astype(int), 4)
            new_N = [decode(rng, *pair) for pair in zip(chances, rounds_N, strict=True)]
            ratios.append((np.array(new_N, float), rounds_N.astype(float)))
        yield ratios[::-1], task_N


def truth(rng: np.random.Generator, tasks: list[tuple[int, int]], size: int, drafters: int) -> float:
    """Return the expected ratio of a sample's sums; rounds do not depend on the chance."""
    shares = np.bincount(np.arange(size) % len(tasks), minlength=len(tasks)) / size
    chances = [rng.beta(*task, 400_000) for task in tasks]
    lengths = [
        shares @ [length(np.minimum(chance + number * GAIN, 0.98)).mean() for chance in chances] for number in range(drafters)
    ]
    return float(lengths[0] if drafters == 1 else lengths[1] - lengths[0])


def ours(ratios: list, task_N: Floats, _: np.random.Generator) -> tuple[float, float]:
    """The report's interval."""
    found = estimate(*ratios, strata_N=task_N)
    return found["low"], found["high"]


def percentile(ratios: list, task_N: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """The percentile bootstrap's, of 400 resamples that keep each task's number of records."""
    members = [np.flatnonzero(task_N == task) for task in np.unique(task_N)]
    index_RN = np.concatenate([rng.choice(member, (400, len(member))) for member in members], axis=1)
    statistics = [over_N[index_RN].sum(1) / under_N[index_RN].sum(1) for over_N, under_N in ratios]
    low, high = np.quantile(statistics[0] - sum(statistics[1:]), [0.025, 0.975])
    return float(low), float(high)


def coverage(method: Callable[..., tuple[float, float]], tasks: list[tuple[int, int]], size: int, drafters: int) -> float:
    """Share of intervals that hold the truth."""
    rng = np.random.default_rng(size)
    wanted = truth(rng, tasks, size, drafters)
    held = [low <= wanted <= high for low, high in (method(*one, rng) for one in samples(rng, tasks, size, drafters))]
    return round(float(np.mean(held)), 3)


def main() -> None:
    """Count, print and keep."""
    cases = [(name, tasks, 1) for name, tasks in TASKS.items()] + [("difference", TASKS["three tasks"], 2)]
    found = {
        name: {
            method.__name__: {str(size): coverage(method, tasks, size, drafters) for size in SIZES}
            for method in (ours, percentile)
        }
        for name, tasks, drafters in cases
    }
    print(json.dumps(found, indent=2))
    least = min(rate for name in found if name != "skewed" for size, rate in found[name]["ours"].items() if int(size) >= FEWEST)
    print(f"bar 0.93: {'met' if least >= 0.93 else 'missed'} ({least})")
    about = {
        "machine": machine.describe(("numpy", "scipy")),
        "fewest": FEWEST,
        "samples": SAMPLES,
        "coverage": found,
        "least": least,
    }
    machine.write("interval_coverage", about)


if __name__ == "__main__":
    main()
