"""A target that `device_map` has spread over the devices of one process decodes as it does when one device holds it."""

import re
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from longspec.decode.autoregressive import decode_plain
from longspec.decode.generate import generate
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.models.target import draft_device
from tests.decode.models import WINDOW, generated, make_drafter, make_target
from tests.decode.pretended_devices import FIRST, SECOND, pretended_devices
from tests.refusals import refused

PROMPTS = [[7] * 20, [8, 3, 5]]
TAIL = ("model.layers.2", "model.norm", "lm_head")
LENGTH = 6


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with pretended_devices():
        yield


def spread(target, tail: tuple[str, ...] = TAIL, main: torch.device = FIRST):
    """The target with `tail` on the second device and all else on the first, as transformers dispatches it."""
    names = ["model.embed_tokens", "model.rotary_emb", *(f"model.layers.{n}" for n in range(3)), "model.norm", "lm_head"]
    placed = {name: SECOND if name in tail else FIRST for name in names}
    return accelerate.dispatch_model(target, placed, main_device=main, skip_keys=target._skip_keys_device_placement)


def pair(method: str, family: type = Qwen2Config, placed: tuple[Any, ...] = (), **options):
    """A target with its drafter, and the same two spread."""
    target, parted = make_target(4, family, num_hidden_layers=3), spread(make_target(4, family, num_hidden_layers=3), *placed)
    drafter, own = make_drafter(method, target, **options), make_drafter(method, parted, **options)
    own.layer.load_state_dict(drafter.layer.state_dict())
    own.layer.to(draft_device(parted))
    return target, drafter, parted, own


def decoded(model, drafter, **options):
    """Texts and kept tokens; what is drawn is drawn alike each time."""
    torch.manual_seed(1)
    return [(row.ids, row.accepted) for row in speculate(model, drafter, PROMPTS, max_new_tokens=LENGTH, **options).rows]


@pytest.mark.parametrize(("method", "shape", "drawn"), [("glide", 3, True), ("eagle3", (2, 3), False), ("dflash", 3, False)])
def test_chains_and_trees_are_those_of_the_target_held_whole(method: str, shape: Any, drawn: bool) -> None:
    """Of drawn tokens, and of a row that leaves before the other."""
    target, drafter, parted, own = pair(method)
    assert (parted.device, draft_device(parted)) == (FIRST, SECOND)
    options: dict[str, Any] = {"temperature": 1.0} if drawn else {"eos": generated(target, PROMPTS[0], LENGTH)[3]}
    assert decoded(parted, own, shape=shape, **options) == decoded(target, drafter, shape=shape, **options)


@pytest.mark.parametrize(
    ("method", "proposed", "tail", "main"),
    [
        ("glide", None, ("model.norm", "model.rotary_emb"), FIRST),  # what the draft reads of the cache is not beside it
        ("eagle3", range(0, 61, 2), ("model.layers.2", "model.norm"), SECOND),
    ],
)
def test_a_head_beside_the_embeddings(method: str, proposed: range | None, tail: tuple[str, ...], main: torch.device) -> None:
    options = {"window": None if method == "eagle3" else WINDOW, "ids": proposed and tuple(proposed)}
    target, drafter, parted, own = pair(method, LlamaConfig, (tail, main), **options)
    assert parted.lm_head.weight.device == FIRST
    assert decoded(parted, own, shape=(2, 2)) == decoded(target, drafter, shape=(2, 2))


def test_another_callers_tokens_on_the_first_device_meanwhile() -> None:
    """As of another thread: accelerate keeps where the tokens of the last call were, and brings all logits there."""
    target, drafter, parted, own = pair("eagle3")
    calling: list[bool] = []

    def call_too(*_: object) -> None:
        if not calling:
            calling.append(True)
            parted(torch.tensor([[1]], device=FIRST))
            calling.clear()

    parted.model.norm.register_forward_pre_hook(call_too)
    assert decoded(parted, own) == decoded(target, drafter)


def test_generate_and_plain_decoding() -> None:
    target, _, parted, own = pair("glide")
    whole = [PROMPTS[0] + generated(target, PROMPTS[0], LENGTH)]
    given = torch.tensor(PROMPTS[:1], device=FIRST)
    found = generate(parted, given, draft=own, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    assert (found.device, found.tolist()) == (FIRST, whole)
    start = prefill(parted, PROMPTS[:1])
    for _ in range(2):  # a start is left as it was
        assert PROMPTS[0] + decode_plain(parted, start, LENGTH, None).ids == whole[0]


def test_a_draft_on_the_first_device_is_refused_and_the_advice_is_right() -> None:
    _, _, parted, own = pair("glide")
    own.layer.to(FIRST)
    with refused("draft: layer", f"torch.float64 on {FIRST}", f"torch.float64 on {SECOND}") as told:
        decoded(parted, own)
    own.layer.to(re.findall(r"\.to\('(.*?)'", str(told.value))[0], parted.dtype)
    assert decoded(parted, own)
