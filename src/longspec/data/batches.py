"""Which rows an optimizer step trains: a function of (seed, step) alone, whatever ranks and micro batches share it."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Whole global batches in one epoch. Raises ValueError when there is none."""
    if global_batch_size < 1 or num_rows < global_batch_size:
        raise ValueError(
            f"recipe.global_batch: {global_batch_size} rows in a step do not fit {num_rows} packed rows; "
            "lower global_batch or data.sequence_length, or bring more data"
        )
    return num_rows // global_batch_size


@lru_cache(maxsize=2)
def _shuffle(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """One epoch's permutation [num_rows]."""
    # Sorting raw generator words: numpy promises these stay the same between versions, but not `permutation`'s result.
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def global_batch(num_rows: int, global_batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Row numbers [global_batch_size] of the 0-based optimizer step; an epoch's last incomplete batch is left out."""
    epoch, place = divmod(step, steps_per_epoch(num_rows, global_batch_size))
    start = place * global_batch_size
    return _shuffle(num_rows, seed, epoch)[start : start + global_batch_size].copy()
