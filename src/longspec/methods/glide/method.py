"""GLIDE as the house's draft method `glide`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.contract import Distribution
from longspec.methods.glide import cost, weights
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.draws import draw_row, shift_positions
from longspec.methods.glide.families import class_for
from longspec.methods.glide.layer import GlideLayer, fresh_layer
from longspec.methods.glide.settings import BLOCKS, Draft
from longspec.methods.glide.trainer import PUBLISHED, Glide, reads


class GlideMethod:
    """The contract's answers (methods/contract.py)."""

    name = "glide"
    reads = staticmethod(reads)
    memory = staticmethod(cost.memory)
    operations = staticmethod(cost.operations)
    check_state = staticmethod(weights.check_draft_state)
    check_same = staticmethod(weights.check_same_draft)
    load = staticmethod(weights.load_draft_weights)
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
        return weights.published_layout(state)

    def config_fields(self, config: Any, settings: Draft) -> dict[str, Any]:
        """None: other readers of GLIDE drafts read weights alone."""
        return {}

    def stored_settings(self, path: Path) -> Draft:
        """Published weights are of the variant that was published."""
        return weights.draft_settings(path) or PUBLISHED

    def drafter(
        self, target: Any, layer: GlideLayer, settings: Draft, vocabulary: DraftVocabulary | None = None
    ) -> GlideDrafter:
        """Trees and chains, with a cache of the window alone; its head is the target's, or the rows of it that are chosen."""
        return GlideDrafter(target, layer, settings.window, vocabulary)


METHOD = GlideMethod()
