"""What is read from a target, against transformers' own model, cache and eager attention: each document by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from longspec.methods.glide.attach import attach
from longspec.methods.glide.trainer import Glide
from longspec.states import forward
from tests.targets import VOCABULARY

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def load(path: str) -> Glide:
    return attach(path, dtype=torch.float32)


def own_states(path: str, ids_S: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Last-layer keys and values out of transformers' cache and the final hidden states of one text."""
    eager = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    cache = DynamicCache()  # whole layers, also of windows
    with torch.no_grad():
        # An explicit mask of ones: without it a jump in the positions would be taken for the start of a document.
        out = eager.model(
            ids_S[None],
            attention_mask=torch.ones_like(ids_S[None]),
            position_ids=positions_S[None],
            past_key_values=cache,
            use_cache=True,
        )
    return cache.layers[-1].keys, cache.layers[-1].values, out.last_hidden_state


def packed(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and document ids [1, S] of documents, every second of which has 2 anchors and an offset."""
    ids_S = torch.randint(0, VOCABULARY, (sum(lengths),))
    positions, documents = [], []
    for number, length in enumerate(lengths):
        positions_S = torch.arange(length)
        positions.append(torch.where(positions_S >= 2, positions_S + 900 * (number % 2), positions_S))
        documents.append(torch.full((length,), number))
    return ids_S[None], torch.cat(positions)[None], torch.cat(documents)[None]


@pytest.mark.parametrize("offset", [0, 700])
@pytest.mark.parametrize("chunk", [None, 1, 13, 64])
def test_one_text_with_and_without_an_offset(any_target_path: str, offset: int, chunk: int | None) -> None:
    glide = load(any_target_path)
    glide.states.chunk = chunk
    ids_BS = torch.randint(0, VOCABULARY, (2, 40))
    positions_BS = torch.where(torch.arange(40) >= 3, torch.arange(40) + offset, torch.arange(40)).expand(2, 40)
    got = glide.target_states(ids_BS, positions_BS, None)
    for row in range(2):
        for left, right in zip(got, own_states(any_target_path, ids_BS[row], positions_BS[row]), strict=True):
            torch.testing.assert_close(left[row : row + 1], right, **TOLERANCE)


@pytest.mark.parametrize("chunk", [None, 5, 16, 30])
def test_packed_documents_are_as_if_alone(any_target_path: str, chunk: int | None) -> None:
    """Borders of chunks inside documents, on their borders, and chunks that hold several documents."""
    glide = load(any_target_path)
    glide.states.chunk = chunk
    lengths = (16, 1, 30, 3)
    ids_BS, positions_BS, documents_BS = packed(lengths)
    keys, values, hidden = glide.target_states(ids_BS, positions_BS, documents_BS)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        wanted = own_states(any_target_path, ids_BS[0, part], positions_BS[0, part])
        got = (keys[:, :, part], values[:, :, part], hidden[:, part])
        for left, right in zip(got, wanted, strict=True):
            torch.testing.assert_close(left, right, **TOLERANCE)
        start += length


class Counted:
    """Counts the calls of modules, and the attention products of each layer."""

    def __init__(self, glide: Glide, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        layer = glide.model.layers[-1]
        for name, module in {"mlp": layer.mlp, "lm_head": glide.lm_head, "first mlp": glide.model.layers[0].mlp}.items():
            module.register_forward_hook(lambda *_, name=name: self.count(name))
        product = forward.target_attention

        def counted(module: Any, *arguments: Any, **more: Any) -> Any:
            self.count(f"attention {module.layer_idx}")
            return product(module, *arguments, **more)

        monkeypatch.setattr(forward, "target_attention", counted)

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


@pytest.mark.parametrize("chunk", [None, 13])
def test_the_forward_ends_after_the_last_layers_keys(
    any_target_path: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hard labels, llm_loss skipped: same keys, values and loss; no attention or MLP ran in the last layer."""
    glide = load(any_target_path)
    glide.draft_settings.loss, glide.states.chunk = "hard", chunk
    ids_BS, positions_BS, documents_BS = packed((16, 1, 23))
    wanted = glide.target_states(ids_BS, positions_BS, documents_BS)
    whole = glide(ids_BS, ids_BS, positions_BS, lag=2, document_ids=documents_BS)
    layers = list(glide.model.layers)
    counted = Counted(glide, monkeypatch)
    *_, keys, values, hidden = glide.states(ids_BS, positions_BS, documents_BS, keys_only=True)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])
    assert hidden is None
    cut = glide(ids_BS, ids_BS, positions_BS, lag=2, document_ids=documents_BS, with_llm_loss=False)
    assert torch.equal(cut.loss, whole.loss)
    assert cut.llm_loss is None
    chunks = 1 if chunk is None else 4
    assert counted.calls == {"first mlp": 2 * chunks, "attention 0": 2 * chunks}
    assert list(glide.model.layers) == layers


def test_the_last_layer_is_put_back_after_an_error(target_path: str) -> None:
    glide = load(target_path)
    layers = list(glide.model.layers)
    glide.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    ids_BS = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ZeroDivisionError):
        glide.states(ids_BS, torch.arange(4)[None], None, keys_only=True)
    assert list(glide.model.layers) == layers


def test_soft_labels_need_the_whole_target_also_when_its_loss_is_skipped(target_path: str) -> None:
    glide = load(target_path)
    glide.draft_settings.loss = "soft"
    ids_BS = torch.randint(0, VOCABULARY, (1, 20))
    with_it, without = glide(ids_BS, ids_BS), glide(ids_BS, ids_BS, with_llm_loss=False)
    assert torch.equal(with_it.loss, without.loss)
    assert without.llm_loss is None
    assert without.agreement is not None


def test_nothing_of_the_target_gets_a_gradient_and_it_runs_in_inference_mode(any_target_path: str) -> None:
    glide = load(any_target_path)
    ids_BS = torch.randint(0, VOCABULARY, (1, 20))
    seen = []
    glide.model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    glide(ids_BS, ids_BS).loss.backward()
    assert seen == [True]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in glide.target.parameters())
    assert all(parameter.grad is not None for parameter in glide.draft_model.parameters())
