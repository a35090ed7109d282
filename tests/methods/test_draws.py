"""Random draws: a function of (seed, step, row), with the published ranges."""

import numpy as np
from omegaconf import OmegaConf

from longspec.config import Recipe
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.methods.glide.method import RowDraw, draw_row, shift_positions
from longspec.methods.glide.settings import Draft, Method
from longspec.train.micro_batches import StepBatches
from tests.corpus import Corpus

DRAFT = Draft(anchors="random", lag_mode="random", lag=4)


def draws(draft: Draft, length: int = 1024, target_positions: int = 40960, count: int = 3000) -> list[RowDraw]:
    return [draw_row(draft, 42, step, row, length, target_positions) for step in range(count // 30) for row in range(30)]


def test_ranges_are_filled_and_kept() -> None:
    drawn = draws(DRAFT)
    assert {d.anchors for d in drawn} == {0, 1, 2, 3, 4}
    assert {d.lag for d in drawn} == {1, 2, 3, 4}
    offsets = np.array([d.offset for d in drawn])
    assert offsets.min() >= 0
    assert offsets.max() <= 30000 - 1024
    # Mean of U{0..28976}; 5 standard errors of 3000 draws.
    assert abs(offsets.mean() - 28976 / 2) < 5 * 28976 / np.sqrt(12 * 3000)


def test_short_targets_and_long_rows() -> None:
    assert max(d.offset for d in draws(DRAFT, target_positions=4096)) <= 4096 - 1000 - 1024
    assert {d.offset for d in draws(DRAFT, target_positions=1500)} == {0}
    assert {d.offset for d in draws(DRAFT, length=1201)} == {0}
    assert {d.offset for d in draws(DRAFT, length=1200)} != {0}


def test_same_arguments_same_draw_and_neighbours_differ() -> None:
    assert draws(DRAFT, count=90) == draws(DRAFT, count=90)
    by_row = {draw_row(DRAFT, 42, 5, row, 1024, 40960) for row in range(50)}
    by_step = {draw_row(DRAFT, 42, step, 5, 1024, 40960) for step in range(50)}
    by_seed = {draw_row(DRAFT, seed, 5, 5, 1024, 40960) for seed in range(50)}
    assert min(len(by_row), len(by_step), len(by_seed)) == 50


def test_a_row_draws_the_same_on_any_rank_and_in_any_micro_batch(corpus: Corpus) -> None:
    rows = PackedRows(corpus.packed)
    recipe = OmegaConf.structured(Recipe(method=Method(), draft=DRAFT, global_batch=4))

    def drawn(world_size: int, micro_batch: int, step: int) -> dict[int, tuple[list[int], int]]:
        found = {}
        for rank in range(world_size):
            batches = StepBatches(TrainedRows(rows), recipe, micro_batch, Ranks(rank, rank, world_size), 40960)
            for numbers in batches.micro_batches(step):
                batch = batches.load(step, numbers)
                assert batch.row_numbers.tolist() == numbers.tolist()
                for place, number in enumerate(numbers):
                    found[int(number)] = (batch.position_ids[place].tolist(), int(batch.arguments["lag"][place]))
        return found

    for step in range(5):
        assert len(drawn(1, 4, step)) == 4
        assert drawn(1, 4, step) == drawn(1, 1, step) == drawn(2, 2, step) == drawn(4, 1, step)
    assert drawn(1, 4, 0) != drawn(1, 4, 1)


def test_shift_keeps_each_documents_anchors() -> None:
    positions_S = np.array([0, 1, 2, 3, 4, 0, 1, 2])
    shifted = shift_positions(positions_S, RowDraw(anchors=2, offset=10, lag=1))
    assert shifted.tolist() == [0, 1, 12, 13, 14, 0, 1, 12]
