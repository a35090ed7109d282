"""Random draws: a function of (seed, step, row), with the published ranges."""

import numpy as np

from longspec.methods.glide.method import RowDraw, draw_row, shift_positions
from longspec.methods.glide.settings import Draft

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


def test_shift_keeps_each_documents_anchors() -> None:
    positions_S = np.array([0, 1, 2, 3, 4, 0, 1, 2])
    shifted = shift_positions(positions_S, RowDraw(anchors=2, offset=10, lag=1))
    assert shifted.tolist() == [0, 1, 12, 13, 14, 0, 1, 12]
