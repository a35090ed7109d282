"""The random draws of a training step: anchor-offset positions and lags, a function of (seed, step, global row) alone.

Shapes: S tokens of one row.
"""

from dataclasses import dataclass

import numpy as np

from longspec.methods.glide.settings import Draft

# The published code keeps this many positions free at the end of the target's range.
RESERVED_POSITIONS = 1000


@dataclass(frozen=True)
class RowDraw:
    """Values drawn for one row in one step."""

    anchors: int
    offset: int
    lag: int


def draw_row(draft: Draft, seed: int, step: int, row: int, length: int, target_positions: int) -> RowDraw:
    """Anchors, offset and lag of one row (LongSpec 3.1, 3.2 and the published limits).

    length: tokens of the row; target_positions: the target's max_position_embeddings. Rows longer than `anchors_up_to` and
    targets too short for an offset keep plain positions (offset 0).
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, row])))
    anchors = int(generator.integers(0, draft.anchor_tokens + 1))
    limit = min(draft.max_position, target_positions - RESERVED_POSITIONS) - length
    offset = int(generator.integers(0, max(limit, 0) + 1))
    lag = int(generator.integers(1, draft.lag + 1))
    if draft.anchors == "fixed":
        anchors = draft.anchor_tokens
    if draft.anchors == "off" or length > draft.anchors_up_to:
        anchors = offset = 0
    return RowDraw(anchors, offset, draft.lag if draft.lag_mode == "fixed" else lag)


def shift_positions(position_ids_S: np.ndarray, draw: RowDraw) -> np.ndarray:
    """Anchor-offset positions: each document's first `anchors` tokens stay, all later ones move by `offset`."""
    return np.where(position_ids_S >= draw.anchors, position_ids_S + draw.offset, position_ids_S)
