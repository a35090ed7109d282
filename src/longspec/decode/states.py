"""The target as a drafter reads it while a text is decoded: a twin that keeps the hidden states it was asked for.

Shapes: B rows, S tokens of a forward, E tokens of a path, H hidden width.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from longspec.models.attention.twin import keep_hidden, twin_with
from longspec.models.placement import draft_device
from longspec.states.tensors import FINAL, HIDDEN, KEYS, VALUES, check_names, layer_of, layers_of


def is_hidden(name: str) -> bool:
    """Whether a tensor of the target is made once for each token, and is not in its cache."""
    return name == FINAL or name.startswith(HIDDEN)


class ReadTarget:
    """A target with some attention, and the hidden states [B, S, H] of its last forward, by name.

    Raises ValueError for a name that the target has no tensor of.
    """

    def __init__(self, target: Any, attention: str, reads: tuple[str, ...]) -> None:
        check_names(reads, target.config.num_hidden_layers)
        self.model, self.hidden = twin_with(target, attention), dict[str, Tensor]()
        self._device = draft_device(target)
        self._names = [name for name in reads if is_hidden(name)]
        self._cached = [name for name in reads if not is_hidden(name)]
        self.cached_layers = layers_of(self._cached, KEYS) | layers_of(self._cached, VALUES)
        if self._names:
            keep_hidden(self.model, layers_of(self._names, HIDDEN), self._keep)

    def _keep(self, layer: int | None, hidden_BSH: Tensor) -> None:
        name = FINAL if layer is None else f"{HIDDEN}{layer}"
        if name in self._names:
            self.hidden[name] = hidden_BSH.to(self._device)

    def cached(self, cache: Cache) -> dict[str, Tensor]:
        """The keys and values that are read, out of the target's cache."""
        layers = {name: cache.layers[layer_of(name)] for name in self._cached}
        found = {name: layer.keys if name.startswith(KEYS) else layer.values for name, layer in layers.items()}
        return {name: x_BKTD.to(self._device) for name, x_BKTD in found.items()}

    def hidden_of(self, path_BE: Tensor) -> dict[str, Tensor]:
        """The hidden states of these tokens of the last forward, [B, E, H]."""
        return {
            name: hidden_BSH.gather(1, path_BE[:, :, None].expand(-1, -1, hidden_BSH.shape[2]))
            for name, hidden_BSH in self.hidden.items()
        }
