"""What is read from a target, against transformers' own model, cache and eager attention: each document by itself."""

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


def own_output(eager: Any, ids_S: Tensor, positions_S: Tensor) -> tuple[Any, DynamicCache]:
    """transformers' hidden states of one text, with its cache."""
    cache = DynamicCache()  # whole layers, also of windows
    # An explicit mask of ones: without it a jump in the positions would be taken for the start of a document.
    out = eager.model(
        ids_S[None],
        attention_mask=torch.ones_like(ids_S[None]),
        position_ids=positions_S[None],
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
    )
    return out, cache


@torch.no_grad()
def own_states(path: str, ids_S: Tensor, positions_S: Tensor) -> dict[str, Tensor]:
    """Every named tensor of one text, out of transformers' cache and hidden states."""
    out, cache = own_output(eager_target(path), ids_S, positions_S)
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


@pytest.mark.parametrize(("offset", "chunk"), [(0, 1), (700, None)])
def test_one_text_with_and_without_an_offset(any_target_path: str, offset: int, chunk: int | None) -> None:
    glide = load(any_target_path)
    glide.states.chunk = chunk
    ids_BS = torch.randint(0, VOCABULARY, (2, 40))
    positions_BS = torch.where(torch.arange(40) >= 3, torch.arange(40) + offset, torch.arange(40)).expand(2, 40)
    got = glide.states(ids_BS, positions_BS, None, EVERY_NAME)
    assert got.keys() == {*EVERY_NAME, *ALONGSIDE}
    for row in range(2):
        wanted = own_states(any_target_path, ids_BS[row], positions_BS[row])
        for name in EVERY_NAME:
            torch.testing.assert_close(got[name][row : row + 1], wanted[name], **TOLERANCE)


def test_packed_documents_are_as_if_alone(any_target_path: str) -> None:
    """Borders of chunks inside documents, on their borders, and chunks that hold several documents."""
    glide = load(any_target_path)
    glide.states.chunk = 16
    lengths = (16, 1, 30, 3)
    ids_BS, positions_BS, documents_BS = packed(lengths)
    got = glide.states(ids_BS, positions_BS, documents_BS, EVERY_NAME)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        wanted = own_states(any_target_path, ids_BS[0, part], positions_BS[0, part])
        for name in EVERY_NAME:
            torch.testing.assert_close(got[name][..., part, :], wanted[name], **TOLERANCE)
        start += length


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
    """A Linear on it has a backward; the target gets no gradient, and its forward makes none."""
    glide, seen = load(target_path), []
    glide.states.chunk = 13
    glide.model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    ids_BS = torch.randint(0, VOCABULARY, (1, 40))
    for name, got in glide.states(ids_BS, torch.arange(40)[None], None, EVERY_NAME).items():
        assert not got.requires_grad, name
        assert not got.is_inference(), name
        torch.nn.Linear(got.shape[-1], 5)(got).square().sum().backward()
    glide(ids_BS, ids_BS).loss.backward()
    assert set(seen) == {False}
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in glide.target.parameters())
    assert all(parameter.grad is not None for parameter in glide.draft_model.parameters())
