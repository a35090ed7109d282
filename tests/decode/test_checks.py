"""What decoding refuses at each of its doors: targets whose text it would change, drafters and prompts that do not fit."""

import copy
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from longspec.decode.autoregressive import decode_plain
from longspec.decode.generate import generate
from longspec.decode.lookup import LookupDrafter
from longspec.decode.prefill import prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.methods.glide.drafter import GlideDrafter
from tests.decode.models import DEPTHS, SHAPE, make_drafter, make_layer, make_target
from tests.refusals import refused


def doors(target: Any, drafter: Any, prompt: list[int]) -> list[Any]:
    """Each way into decoding with a ready drafter."""
    settings = {"max_new_tokens": 3, "do_sample": False}
    return [
        lambda: speculate(target, drafter, [prompt], max_new_tokens=3),
        lambda: prefill(target, [prompt]),
        lambda: generate(target, torch.tensor([prompt]), draft=drafter, **settings),
    ]


def soft_capped() -> Any:
    return AutoModelForCausalLM.from_config(Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=5.0))


def dynamic() -> Any:
    return make_target(0, LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


TARGETS = [
    (soft_capped, ("target", "model_type 'gemma2'", "llama")),
    (dynamic, ("target", "rope_type 'dynamic'")),
    (lambda: make_target(0).to("meta"), ("target", "on meta")),
]


@pytest.mark.parametrize(("make", "told"), TARGETS)
def test_targets_are_checked_at_every_door(make: Any, told: tuple[str, ...]) -> None:
    """A ready drafter, which needs nothing of the target, opens none of them; nor does a start of another target."""
    target = make()
    for door in doors(target, LookupDrafter(), [1, 2, 3]):
        with refused(*told):
            door()
    with refused(*told):
        speculate(target, LookupDrafter(), prefill(make_target(0), [[1, 2, 3]]), max_new_tokens=3)


@pytest.mark.parametrize("wrong", [[1, 61, 2], [-1]])
def test_ids_outside_the_vocabulary_are_named(wrong: list[int]) -> None:
    """Before anything is streamed."""
    target, token = make_target(0), len(wrong) // 2
    place = f"prompts: row {{}}, token {token}: {wrong[token]}"
    for door in doors(target, LookupDrafter(), wrong):
        with refused(place.format(0), "0..60"):
            door()
    with refused(place.format(1), "0..60"):
        prefill(target, [[1], wrong])
    with refused(place.format(0), "0..60"):
        generate(target, torch.tensor([wrong]), draft=LookupDrafter(), max_new_tokens=3, streamer=object())


def test_what_is_no_drafter_of_this_target_is_refused() -> None:
    """None, a number, a draft that reads another target, and one whose layer was left behind in another dtype."""
    target = make_target(0)
    drafter = GlideDrafter(target, make_layer(target), 12)
    left_behind = GlideDrafter(target, copy.deepcopy(drafter.layer).float(), 12)
    faults = [
        (None, ("draft: None", "draft folder", "load_drafter")),
        (4, ("draft: 4", "load_drafter")),
        (GlideDrafter(make_target(0), drafter.layer, 12), ("draft: this drafter", "load_drafter")),
        (left_behind, ("draft: layer", "torch.float32 on cpu", "torch.float64 on cpu", ".to('cpu', target.dtype)")),
    ]
    for wrong, told in faults:
        for door in doors(target, wrong, [1, 2])[::2]:
            with refused(*told):
                door()
    with refused("draft: None"):
        generate(target, torch.tensor([[1, 2]]), draft=None, max_new_tokens=3, streamer=object())  # type: ignore[arg-type]
    left_behind.layer.to(target.device, target.dtype)  # as the message says
    assert speculate(target, left_behind, [[1, 2]], max_new_tokens=3).rows[0].ids


def test_a_targets_rows_of_a_draft_vocabulary_do_not_stay_behind() -> None:
    target = make_target(0)
    drafter = make_drafter("glide", target, ids=(1, 5, 9))
    target.float()
    drafter.layer.float()
    with refused("draft: rows of the head", "is torch.float64 on cpu", "be torch.float32", "drafter anew"):
        speculate(target, drafter, [[1, 2]], max_new_tokens=3)


@pytest.mark.parametrize(
    ("method", "shape", "forwards", "value"), [("glide", 4, 1, float("nan")), ("eagle3", (2, 2), 3, float("inf"))]
)
def test_logits_that_make_no_distribution_raise_as_in_generate(value: float, shape: Any, forwards: int, method: str) -> None:
    """Of the prompt's forward or of a later one; plainly, and for chains that are drawn or looked up and for trees."""
    target, calls = make_target(0, **DEPTHS[method]), []

    def break_logits(_: Any, __: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == forwards:
            output["logits"] = output.logits.index_fill(-1, torch.tensor([7]), value)

    target.register_forward_hook(break_logits)  # not on the head, which the draft calls too
    ids_BT, settings = torch.tensor([[3, 1, 4, 1, 5]]), {"max_new_tokens": 30, "do_sample": True, "top_k": 0}
    drafter = make_drafter(method, target)
    ways = [
        (lambda: target.generate(ids_BT, **settings), "probability tensor"),
        (lambda: generate(target, ids_BT, draft=LookupDrafter(), shape=shape, **settings), "the target's logits"),
        (lambda: generate(target, ids_BT, draft=drafter, shape=shape, **settings), "the target's logits"),
        (lambda: decode_plain(target, prefill(target, ids_BT.tolist()), 30, None, Sampler(1.0)), "the target's logits"),
    ]
    for way, place in ways:
        calls.clear()
        with refused(place, re.compile("inf.*nan", re.IGNORECASE), kind=RuntimeError):
            way()
        assert len(calls) == forwards
