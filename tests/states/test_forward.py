"""What is read from a target, against transformers' own model, cache and eager attention: each document by itself."""

from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from longspec.methods.glide.attach import attach
from longspec.methods.glide.trainer import Glide
from tests.targets import SHAPES, VOCABULARY

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LAYERS = range(SHAPES["num_hidden_layers"])
EVERY_NAME = [f"{kind}.{layer}" for kind in ("keys", "values", "hidden") for layer in LAYERS] + ["final"]
ALONGSIDE = {"embedded", "cos", "sin"}


def load(path: str) -> Glide:
    return attach(path, dtype=torch.float32)


def eager_target(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def own_states(eager: Any, ids_S: Tensor, positions_S: Tensor) -> dict[str, Tensor]:
    """Every named tensor of one text, out of transformers' cache and hidden states."""
    cache = DynamicCache()  # whole layers, also of windows
    # An explicit mask of ones: without it a jump in the positions would be taken for the start of a document.
    asked = {"attention_mask": torch.ones_like(ids_S[None]), "position_ids": positions_S[None], "past_key_values": cache}
    out = eager.model(ids_S[None], use_cache=True, output_hidden_states=True, **asked)
    found = {"final": out.last_hidden_state}
    for layer in LAYERS:
        found |= {f"keys.{layer}": cache.layers[layer].keys, f"values.{layer}": cache.layers[layer].values}
        found[f"hidden.{layer}"] = out.hidden_states[layer]
    return found


def packed(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and document ids [1, S] of documents, every second of which has 2 anchors and an offset."""
    ids_S = torch.randint(0, VOCABULARY, (sum(lengths),))
    positions, documents = [], []
    for number, length in enumerate(lengths):
        positions_S = torch.arange(length)
        positions.append(torch.where(positions_S >= 2, positions_S + 900 * (number % 2), positions_S))
        documents.append(torch.full((length,), number))
    return ids_S[None], torch.cat(positions)[None], torch.cat(documents)[None]


@pytest.mark.parametrize(("lengths", "chunk"), [((16, 1, 30, 3), 16), ((16, 1, 30, 3), None), ((40,), 1)])
def test_each_text_is_as_if_alone(any_target_path: str, lengths: tuple[int, ...], chunk: int | None) -> None:
    """Borders of chunks inside documents, on their borders, and chunks that hold several documents; rows of one text each."""
    glide, eager = load(any_target_path), eager_target(any_target_path)
    glide.states.chunk = chunk
    rows = [packed(lengths) for _ in range(2)]
    ids_BS, positions_BS, documents_BS = (torch.cat(tensors) for tensors in zip(*rows, strict=True))
    got = glide.states(ids_BS, positions_BS, documents_BS if len(lengths) > 1 else None, EVERY_NAME)
    assert got.keys() == {*EVERY_NAME, *ALONGSIDE}
    ends = list(accumulate(lengths))
    for row, (start, end) in product(range(2), zip([0, *ends], ends, strict=False)):
        wanted = own_states(eager, ids_BS[row, start:end], positions_BS[row, start:end])
        for name in EVERY_NAME:
            torch.testing.assert_close(got[name][row : row + 1, ..., start:end, :], wanted[name], **TOLERANCE)


# How many layers run whole for each is counted in tests/train/estimate/test_flops.py.
NAMES = [[], ["hidden.0"], ["keys.0"], ["hidden.1"], ["keys.1"], ["hidden.1", "keys.1", "values.1"], ["final", "hidden.0"]]


@pytest.mark.parametrize("chunk", [None, 13])
def test_a_forward_that_ends_early_gives_the_same_numbers(any_target_path: str, chunk: int | None) -> None:
    """As of a whole one; embeddings and rotations come with all names and none."""
    glide, eager = load(any_target_path), eager_target(any_target_path)
    glide.states.chunk, layers = chunk, list(glide.model.layers)
    ids_BS, positions_BS, documents_BS = packed((16, 1, 23))
    wanted = glide.states(ids_BS, positions_BS, documents_BS, EVERY_NAME)
    assert torch.equal(wanted["embedded"], eager.model.embed_tokens(ids_BS))
    rotations = eager.model.rotary_emb(wanted["embedded"], positions_BS)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in zip(("cos", "sin"), rotations, strict=True))
    for names in NAMES:
        found = glide.states(ids_BS, positions_BS, documents_BS, names)
        assert found.keys() == {*names, *ALONGSIDE}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
        assert list(glide.model.layers) == layers


def test_what_is_read_may_be_saved_for_the_backward_of_what_is_trained_on_it(target_path: str) -> None:
    """A Linear on it has a backward; the target's forward makes none."""
    glide, seen = load(target_path), []
    glide.states.chunk = 13
    glide.model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    ids_BS = torch.randint(0, VOCABULARY, (1, 40))
    for name, got in glide.states(ids_BS, torch.arange(40)[None], None, EVERY_NAME).items():
        assert not got.requires_grad, name
        assert not got.is_inference(), name
        torch.nn.Linear(got.shape[-1], 5)(got).square().sum().backward()
    assert set(seen) == {False}
