"""EAGLE-3 as the house's draft method `eagle3`."""

from pathlib import Path
from typing import Any

from longspec.draft_vocabulary import check_size
from longspec.methods.contract import Distribution, Method
from longspec.methods.eagle3 import cost, weights
from longspec.methods.eagle3.layer import Eagle3Layer, check_vocabulary, fresh_layer
from longspec.methods.eagle3.layer_config import config_fields
from longspec.methods.eagle3.settings import Settings
from longspec.methods.eagle3.trainer import Eagle3Trainer, reads
from longspec.states.forward import TargetStates


class Eagle3Method(Method):
    """The contract's answers (methods/contract.py)."""

    name = "eagle3"
    layer = Eagle3Layer
    reads = staticmethod(reads)
    fresh_layer = staticmethod(fresh_layer)
    memory = staticmethod(cost.memory)
    operations = staticmethod(cost.operations)
    published = staticmethod(weights.published_layout)
    config_fields = staticmethod(config_fields)
    check_state = staticmethod(weights.check_draft_state)
    check_file = staticmethod(weights.check_draft_file)
    stored_settings = staticmethod(weights.draft_settings)

    def learnt(self, settings: Settings) -> Distribution:
        """Over the draft vocabulary; which tokens these are is known where its file was read."""
        return Distribution(settings.ids, 1.0)

    def drafted_steps(self, settings: Settings) -> int:
        """The tokens of a chain, as many as training unrolls."""
        return settings.steps

    def each_step(self, settings: Settings) -> dict[str, Any]:
        """The steps are unrolled in every forward; here each is measured by itself."""
        return {"each_step": True}

    def trainer(self, states: TargetStates, settings: Settings, weights: Path | None) -> Eagle3Trainer:
        """The draft beside a target, fresh or from a draft folder or weight file.

        Raises ValueError that names both values for a vocabulary, a target or a draft that does not fit.
        """
        check_vocabulary(settings)
        tokens = states.config.vocab_size
        check_size("--vocabulary", settings.target_vocabulary or tokens, tokens, "this target")
        if weights is None:
            return Eagle3Trainer(states, fresh_layer(states, settings), settings)
        self.check_same(weights, states.config, settings)
        layer = Eagle3Layer(states.config, settings).to(states.head_weight.dtype)
        self.load(layer, weights)
        return Eagle3Trainer(states, layer, settings)


METHOD = Eagle3Method()
