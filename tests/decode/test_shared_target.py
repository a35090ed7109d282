"""Several decodings and plain generate side by side on one target, which stays as it was."""

from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from longspec.decode.levels import DEFAULT_SHAPE
from longspec.decode.lookup import LookupDrafter
from longspec.decode.speculate import speculate
from tests.decode.models import DEPTHS, METHODS, generated, make_drafter, make_target
from tests.refusals import refused

pytestmark = pytest.mark.slow  # half a minute and more as a whole

NEW = 40
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
IDS = torch.tensor([[0, 0, 0, 7, 8], [1, 2, 3, 4, 5], [0, 0, 5, 5, 6]])
PADDED = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
SHAPE_OF = {Qwen2Config: {}, MistralConfig: {"sliding_window": 9}, LlamaConfig: {}}


def decoded(target: Any, drafter: Any, **settings: Any) -> list[list[int]]:
    return [row.ids for row in speculate(target, drafter, PROMPTS, **{"max_new_tokens": NEW} | settings).rows]


def state(target: Any) -> dict[str, Any]:
    """Every attribute of every module and of every configuration: which object it is, and of dictionaries what they hold."""
    found = {}
    for name, module in target.named_modules():
        for key, value in vars(module).items():
            entries = [(entry, id(held)) for entry, held in value.items()] if isinstance(value, dict) else None
            found[f"{name}.{key}"] = (id(value), entries)
        if "config" in vars(module):
            found[f"{name}.config holds"] = dict(vars(module.config))
    return found


@pytest.mark.parametrize(("method", "shape"), [("glide", 4), ("eagle3", DEFAULT_SHAPE), ("dflash", 4)])
def test_nothing_on_the_target_changes(shape: Any, method: str) -> None:
    """Nor with a flag in its configuration that has transformers hook the layers."""
    target = make_target(1, **DEPTHS[method])
    target.config.output_hidden_states = method == "eagle3"
    target.model.layers[0].register_forward_hook(lambda *_: None)
    before, during = state(target), []
    decoded(target, make_drafter(method, target), shape=shape, on_tokens=lambda *_: during.append(state(target)))
    assert len(during) > 4
    assert all(each == before for each in (*during, state(target)))


@pytest.mark.parametrize(("family", "method"), list(zip(SHAPE_OF, METHODS, strict=True)))
def test_plain_generate_within_a_callback_writes_its_own_text(family: type, method: str) -> None:
    """Of a left-padded batch, whose mask the attention of draft trees does not read; in the first rounds of a text."""
    target = make_target(1, family, **SHAPE_OF[family], **DEPTHS[method])
    alone, texts, inner = target.generate(**PADDED), [generated(target, prompt, NEW) for prompt in PROMPTS], []

    def generate(*_: Any) -> None:
        if len(inner) < 3:
            inner.append(target.generate(**PADDED))

    for drafter in (make_drafter(method, target), LookupDrafter()):
        inner.clear()
        assert decoded(target, drafter, on_tokens=generate) == texts
        assert len(inner) == 3
        assert all(torch.equal(text, alone) for text in inner)


def test_decoding_follows_its_target() -> None:
    """To another dtype, to other weights, and with its hooks, between two texts and within one."""
    target, other, calls = make_target(1), make_target(2), []
    drafter = LookupDrafter()
    assert decoded(target, drafter) == [generated(target, prompt, NEW) for prompt in PROMPTS]
    target.float().double().load_state_dict(other.state_dict())
    texts = [generated(other, prompt, NEW) for prompt in PROMPTS]
    assert decoded(target, drafter) == texts
    hooks = []

    def hook_once(*_: Any) -> None:
        if not hooks:
            hooks.append(target.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1)))

    assert decoded(target, drafter, on_tokens=hook_once) == texts
    assert calls


def test_replaced_forwards_run_or_are_refused() -> None:
    """As accelerate's hooks (a partial call of the module) and kernels (a method bound to it) replace them; a function that
    hides its module, as torch.compile makes, is refused by the module's name."""
    target, calls = make_target(1), []
    texts = [generated(target, prompt, NEW) for prompt in PROMPTS]

    def hooked(module: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(module)
        return module._old_forward(*arguments, **named)

    for module in (target, target.model, *target.model.layers, *(layer.self_attn for layer in target.model.layers)):
        module._old_forward = module.forward
        module.forward = update_wrapper(partial(hooked, module), module._old_forward)
    for layer in target.model.layers:
        layer.mlp.forward = MethodType(type(layer.mlp).forward, layer.mlp)
    assert decoded(target, make_drafter("glide", target), shape=3) == texts
    own = set(target.modules())
    assert not own.issuperset(calls)
    calls.clear()
    target.generate(**PADDED)
    assert own.issuperset(calls)
    forward = target.model.layers[1].forward
    target.model.layers[1].forward = lambda *arguments, **named: forward(*arguments, **named)
    with refused("model.layers.1.forward", "torch.compile"):
        decoded(target, LookupDrafter())
