"""A target seen with another attention, beside the target itself, which does not change.

transformers chooses a module's attention by the module's `config`. The twin is a second tree of modules that differs in the
configuration alone.
"""

from collections.abc import Callable, Collection
from copy import copy, deepcopy
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn


def twin_with(model: Any, attention: str) -> Any:
    """A twin of the model that runs with the attention registered under this name.

    Modules without children are those of the model itself; the others hold its dictionaries of parameters, buffers and hooks,
    not copies: what is moved, loaded or hooked in one tree is so in the other. A module that is exchanged later is not, so a
    twin, which takes no tensor and no time, is made anew for each text. Raises ValueError for a model with a replaced `forward`
    that cannot be told to run in the twin.
    """
    twins: dict[int, Any] = {}
    configs: dict[int, Any] = {}  # as deepcopy keeps them: one copy of each
    for name, module in model.named_modules():
        if any(module.children()):
            _check_forward(module, name or type(model).__name__)
            twins[id(module)] = copy(module)
    for twin in twins.values():
        held = vars(twin)
        held["_modules"] = {name: twins.get(id(child), child) for name, child in held["_modules"].items()}
        if "config" in held:
            held["config"] = deepcopy(held["config"], configs)
            held["config"]._attn_implementation = attention
        if "forward" in held:
            held.update({name: _rebound(value, twins) for name, value in held.items()})
    return twins[id(model)]


def _check_forward(module: nn.Module, name: str) -> None:
    """Refuse a function that hides which modules it calls, as torch.compile makes them."""
    replaced = vars(module).get("forward")
    if replaced is not None and not isinstance(replaced, MethodType | partial):
        raise ValueError(
            f"{name}.forward: was replaced by a function, which cannot be given the attention of draft trees; hand over the "
            "model as it was before, such as before torch.compile"
        )


def _rebound(value: Any, twins: dict[int, Any]) -> Any:
    """A method or a partial call of modules, as some libraries put them in place of `forward`, with their twins instead."""
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, partial):
        return partial(_rebound(value.func, twins), *(twins.get(id(each), each) for each in value.args), **value.keywords)
    return value


def keep_hidden(twin: Any, layers: Collection[int], keep: Callable[[int | None, Tensor], None]) -> None:
    """Have a twin hand over the inputs of these layers, by number, and its final hidden states, by None, in each forward."""

    def handing_on(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden_BSH: Tensor, *arguments: Any, **named: Any) -> Any:
            keep(number, hidden_BSH)
            return forward(hidden_BSH, *arguments, **named)

        return run

    for number in layers:
        layer = twin.model.layers[number]
        vars(layer)["forward"] = handing_on(number, layer.forward)
    whole = twin.model.forward

    def run(*arguments: Any, **named: Any) -> Any:
        output = whole(*arguments, **named)
        keep(None, output.last_hidden_state)
        return output

    vars(twin.model)["forward"] = run
