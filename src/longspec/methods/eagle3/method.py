"""EAGLE-3 as the house's draft method `eagle3`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.contract import Distribution
from longspec.methods.eagle3 import cost, weights
from longspec.methods.eagle3.drafter import Eagle3Drafter
from longspec.methods.eagle3.engine_config import config_fields
from longspec.methods.eagle3.layer import Eagle3Layer, fresh_layer
from longspec.methods.eagle3.settings import Settings
from longspec.methods.eagle3.trainer import reads, trainer


class Eagle3Method:
    """The contract's answers (methods/contract.py)."""

    name = "eagle3"
    layer = Eagle3Layer
    reads = staticmethod(reads)
    fresh_layer = staticmethod(fresh_layer)
    trainer = staticmethod(trainer)
    memory = staticmethod(cost.memory)
    operations = staticmethod(cost.operations)
    published = staticmethod(weights.published_layout)
    config_fields = staticmethod(config_fields)
    check_state = staticmethod(weights.check_draft_state)
    check_same = staticmethod(weights.check_same_draft)
    load = staticmethod(weights.load_draft_weights)
    stored_settings = staticmethod(weights.draft_settings)

    def learnt(self, settings: Settings) -> Distribution:
        """Over the draft vocabulary; which tokens these are is known where its file was read."""
        return Distribution(settings.ids, 1.0)

    def draws(
        self, settings: Settings, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Plain positions; nothing is drawn."""
        return [plain_S for _, plain_S in rows], {}

    def drafted_steps(self, settings: Settings) -> int:
        """The tokens of a chain, as many as training unrolls."""
        return settings.steps

    def each_step(self, settings: Settings) -> dict[str, Any]:
        """The steps are unrolled in every forward; here each is measured by itself."""
        return {"each_step": True}

    def heaviest(self, settings: Settings) -> dict[str, Any]:
        """All forwards weigh the same."""
        return {}

    def drafter(
        self, target: Any, layer: Eagle3Layer, settings: Settings, vocabulary: DraftVocabulary | None = None
    ) -> Eagle3Drafter:
        """Trees and chains, of the tokens that its own head proposes."""
        assert vocabulary is None, "methods.drafter hands it none"
        return Eagle3Drafter(target, layer, settings)


METHOD = Eagle3Method()
