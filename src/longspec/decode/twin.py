"""The target as a drafter reads it while a text is decoded. The target itself does not change.

transformers chooses a module's attention by the module's `config`. The twin is a second tree of modules that differs only in
the configuration, and hands over the hidden states that were asked for.

Shapes: B rows, S tokens of a forward, E tokens of a path, H hidden width.
"""

from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from longspec.models.target import draft_device
from longspec.states.tensors import FINAL, HIDDEN, KEYS, VALUES, layer_of, layers_of

# With one of them in its configuration, transformers' forward hooks the layers, whose hooks are the target's own too.
CAPTURED = ("output_hidden_states", "_output_attentions", "output_router_logits")


def twin_with(model: Any, attention: str) -> Any:
    """Return a twin of the model that runs with the attention registered under this name.

    Modules without children are the model's own. The others share its dictionaries of parameters, buffers and hooks: what is
    moved, loaded or hooked in one tree is so in the other. A module that is exchanged later is not, so make a new twin for each
    text; it takes no tensor and no time. Raises ValueError if a module's `forward` was replaced by what cannot run in the
    twin.
    """
    twins: dict[int, Any] = {}
    configs: dict[int, Any] = {}  # as deepcopy keeps them: one copy of each
    for name, module in model.named_modules():
        if any(module.children()):
            replaced = vars(module).get("forward")
            if replaced is not None and not isinstance(replaced, MethodType | partial):
                raise ValueError(  # a function hides which modules it calls, as torch.compile makes them
                    f"{name or type(model).__name__}.forward: was replaced by a function, which cannot be given the attention "
                    "of draft trees; hand over the model as it was before, such as before torch.compile"
                )
            twins[id(module)] = copy(module)
    for twin in twins.values():
        held = vars(twin)
        held["_modules"] = {name: twins.get(id(child), child) for name, child in held["_modules"].items()}
        if "config" in held:
            held["config"] = deepcopy(held["config"], configs)
            held["config"]._attn_implementation = attention
            vars(held["config"]).update(dict.fromkeys(CAPTURED, False))
        if "forward" in held:
            held.update({name: _rebound(value, twins) for name, value in held.items()})
    return twins[id(model)]


def _rebound(value: Any, twins: dict[int, Any]) -> Any:
    """Return a method or a partial call that a library put in place of `forward`, with twins in place of its modules."""
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, partial):
        return partial(_rebound(value.func, twins), *(twins.get(id(each), each) for each in value.args), **value.keywords)
    return value


class ReadTarget:
    """Hold a target with some attention, and the hidden states [B, S, H] of its last forward, by name."""

    def __init__(self, target: Any, attention: str, reads: tuple[str, ...]) -> None:
        self.model, self.hidden = twin_with(target, attention), dict[str, Tensor]()
        self._device = draft_device(target)
        self._names = [name for name in reads if name == FINAL or name.startswith(HIDDEN)]
        self._cached = [name for name in reads if name not in self._names]
        self.cached_layers = layers_of(self._cached, KEYS, VALUES)
        for name in self._names:
            module = self.model.model if name == FINAL else self.model.model.layers[layer_of(name)]
            vars(module)["forward"] = self._keeping(name, module.forward)

    def _keeping(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that keeps the hidden states that a layer gets, or that the whole model returns."""

        def run(*arguments: Any, **named: Any) -> Any:
            if name != FINAL:
                self.hidden[name] = arguments[0].to(self._device)
            output = forward(*arguments, **named)
            if name == FINAL:
                self.hidden[name] = output.last_hidden_state.to(self._device)
            return output

        return run

    def cached(self, cache: Cache) -> dict[str, Tensor]:
        """Return the keys and values that the drafter reads, out of the target's cache, by name."""
        layers = {name: cache.layers[layer_of(name)] for name in self._cached}
        found = {name: layer.keys if name.startswith(KEYS) else layer.values for name, layer in layers.items()}
        return {name: x_BKTD.to(self._device) for name, x_BKTD in found.items()}

    def hidden_of(self, path_BE: Tensor) -> dict[str, Tensor]:
        """Return the hidden states of a path's tokens in the last forward, [B, E, H] by name."""
        return {
            name: hidden_BSH.gather(1, path_BE[:, :, None].expand(-1, -1, hidden_BSH.shape[2]))
            for name, hidden_BSH in self.hidden.items()
        }
