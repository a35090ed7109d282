"""GLIDE as the house's draft method `glide`, and the random draws of its training: a function of (seed, step, row) alone.

Shapes: S tokens of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.methods.contract import Distribution, Method
from longspec.methods.glide import cost
from longspec.methods.glide.layer import GlideLayer, check_draft_state, draft_settings, fresh_layer, published_layout
from longspec.methods.glide.settings import BLOCKS, Draft
from longspec.methods.glide.trainer import PUBLISHED, Glide, class_for, reads

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


class GlideMethod(Method):
    """The contract's answers (methods/contract.py)."""

    name = "glide"
    reads = staticmethod(reads)
    memory = staticmethod(cost.memory)
    operations = staticmethod(cost.operations)
    check_state = staticmethod(check_draft_state)
    fresh_layer = staticmethod(fresh_layer)

    def learnt(self, settings: Draft) -> Distribution | None:
        """Over all tokens, for soft labels."""
        return None if settings.loss == "hard" else Distribution(None, settings.temperature)

    def layer(self, config: Any, settings: Draft) -> GlideLayer:
        """One decoder layer."""
        return GlideLayer(config, final_norm=settings.final_norm)

    def trainer(self, states: Any, settings: Draft, start: Path | None) -> Glide:
        """The class of the target's family."""
        path = None if start is None else str(start)
        return class_for(states.config.model_type)(states.config, "", path, draft=settings, states=states)

    def draws(
        self, settings: Draft, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Anchor-offset positions, and the lag of each row."""
        draws = [draw_row(settings, seed, step, number, len(plain_S), target_positions) for number, plain_S in rows]
        positions = [shift_positions(plain_S, draw) for (_, plain_S), draw in zip(rows, draws, strict=True)]
        lag = BLOCKS if settings.lag_mode == BLOCKS else torch.tensor([draw.lag for draw in draws])
        return positions, {"lag": lag}

    def drafted_steps(self, settings: Draft) -> int:
        """The longest lag."""
        return settings.lag

    def each_step(self, settings: Draft) -> dict[str, Any]:
        """In step k of drafting nothing is seen of the target's newest k tokens."""
        return {"lag": tuple(range(1, settings.lag + 1))}

    def heaviest(self, settings: Draft) -> dict[str, Any]:
        """The lag that hides least."""
        return {"lag": BLOCKS if settings.lag_mode == BLOCKS else 1}

    def published(self, state: dict[str, Tensor], settings: Draft) -> dict[str, Tensor]:
        """The published set of names."""
        return published_layout(state)

    def stored_settings(self, path: Path) -> Draft:
        """Published weights are of the variant that was published."""
        return draft_settings(path) or PUBLISHED


METHOD = GlideMethod()
