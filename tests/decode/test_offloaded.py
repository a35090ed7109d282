"""A target of which `device_map` keeps layers elsewhere, and which runs on one device, decodes as it does when held whole."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from longspec.decode.lookup import LookupDrafter
from longspec.decode.speculate import speculate
from tests.decode.models import METHODS, generated, make_drafter, make_target
from tests.refusals import refused

AROUND = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")


def offloaded(target, folder: Path, placed: dict[str, str]):
    """The target anew, without the weights of what is placed on `disk` but for the length of their own forwards."""
    target.save_pretrained(folder / "target")
    return AutoModelForCausalLM.from_pretrained(
        folder / "target", dtype=torch.float64, device_map=placed, offload_folder=folder / "offloaded"
    ).eval()


@pytest.mark.parametrize(("method", "family"), list(zip(METHODS, (Qwen2Config, LlamaConfig, Qwen2Config), strict=True)))
def test_chains_and_trees_are_those_of_the_target_held_whole(family: type, method: str, tmp_path: Path) -> None:
    target = make_target(4, family, num_hidden_layers=3)
    layers = {f"model.layers.{number}": place for number, place in enumerate(("disk", "cpu", "disk"))}
    parted = offloaded(target, tmp_path, AROUND | layers | {"model.norm": "disk"})
    drafter, own = make_drafter(method, target), make_drafter(method, parted)
    own.layer.load_state_dict(drafter.layer.state_dict())
    assert parted.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    prompts = [[7] * 20, [8, 3, 5]]
    plain = [generated(target, prompt, 16) for prompt in prompts]
    for shape in (3, (2, 3)):
        whole, found = (
            speculate(model, each, prompts, max_new_tokens=16, shape=shape).rows
            for model, each in ((target, drafter), (parted, own))
        )
        assert [row.ids for row in found] == [row.ids for row in whole] == plain
        assert [row.accepted for row in found] == [row.accepted for row in whole]
    assert parted.model.layers[0].mlp.up_proj.weight.device.type == "meta", "decoding leaves the target as it was"


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"])
def test_what_drafts_read_themselves_must_stay(part: str, tmp_path: Path) -> None:
    parted = offloaded(make_target(4), tmp_path, AROUND | {"model.layers": "cpu", part: "disk"})
    with refused("target", "meta", "device_map", "model.embed_tokens and lm_head"):
        speculate(parted, LookupDrafter(), [[1]], max_new_tokens=1)
