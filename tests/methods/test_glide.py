"""The draft against plain PyTorch, row by row and document by document."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspec.methods.glide.attach import attach
from longspec.methods.glide.method import RowDraw, shift_positions
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide
from tests.reference import draft_hidden
from tests.targets import VOCABULARY

WINDOW = 20


def make(target_path: str, loss: str = "hard", window: int = WINDOW, **draft: Any) -> Glide:
    settings = Draft(window=window, anchors="off", lag_mode="random", loss=loss, **draft)
    torch.manual_seed(3)
    glide = attach(target_path, dtype=torch.float32, draft=settings)
    for parameter in glide.draft_model.parameters():  # away from the special points of a fresh layer
        torch.nn.init.normal_(parameter, std=0.2)
    return glide


def reference_loss(glide: Glide, ids_S: Tensor, labels_S: Tensor, positions_S: Tensor, target_seen_SS: Tensor) -> Tensor:
    """Summed hard loss of one document, with transformers' eager target."""
    window = glide.draft_settings.window
    config = glide.config
    eager = AutoModelForCausalLM.from_pretrained(glide.target.name_or_path, dtype=torch.float32, attn_implementation="eager")
    causal = torch.ones(len(ids_S), len(ids_S)).tril().bool()
    with torch.no_grad():
        out = eager.model(
            ids_S[None],
            position_ids=positions_S[None],
            attention_mask=torch.where(causal, 0.0, torch.finfo(torch.float32).min)[None, None],
            use_cache=True,
        )
        embedded_SH = eager.model.embed_tokens(ids_S)
    last = out.past_key_values.layers[-1]
    distance = torch.arange(len(ids_S))[:, None] - torch.arange(len(ids_S))[None, :]
    hidden_SH = draft_hidden(
        dict(glide.draft_model.named_parameters()),
        embedded_SH,
        positions_S,
        last.keys[0],
        last.values[0],
        (distance >= 0) & (distance <= window),
        target_seen_SS,
        (config.num_attention_heads, config.num_key_value_heads),
        config.rms_norm_eps,
        config.rope_parameters["rope_theta"],
    )
    logits_SV = hidden_SH @ eager.lm_head.weight.T
    return torch.nn.functional.cross_entropy(logits_SV[:-1], labels_S[1:], ignore_index=-100, reduction="sum")


def lagged(length: int, lag: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)[None, :] >= lag


def blocked(length: int, block: int) -> Tensor:
    return torch.arange(length)[:, None] // block > torch.arange(length)[None, :] // block


def compare(glide: Glide, loss: Tensor, expected: Tensor) -> None:
    """Same value and same gradients, to 1e-4 relative."""
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    names = [name for name, _ in glide.draft_model.named_parameters()]
    parameters = list(glide.draft_model.parameters())
    got = torch.autograd.grad(loss, parameters)
    wanted = torch.autograd.grad(expected, parameters)
    for name, left, right in zip(names, got, wanted, strict=True):
        assert (left - right).norm() <= 1e-4 * right.norm() + 1e-9, name


PUBLISHED_WINDOW, PROMPT = 512, 200


@pytest.mark.parametrize(("length", "draws"), [(700, [(0, 0, 1), (4, 2300, 2)]), (1500, [(1, 2500, 4), (3, 0, 3)])])
def test_the_published_forward_beyond_the_window(target_path: str, length: int, draws: list[tuple[int, int, int]]) -> None:
    """The faithful setting: hard labels, window 512, prompt labels masked, given sink, offset and lag, one of each a row."""
    glide = make(target_path, window=PUBLISHED_WINDOW)
    ids_BS = torch.randint(0, VOCABULARY, (2, length))
    labels_BS = ids_BS.clone()
    labels_BS[:, :PROMPT] = -100
    rows = [RowDraw(*draw) for draw in draws]
    positions_BS = torch.stack([torch.from_numpy(shift_positions(np.arange(length), row)) for row in rows])
    for row, (sink, offset, _) in enumerate(draws):  # the paper's own words
        assert positions_BS[row, :sink].tolist() == list(range(sink))
        assert positions_BS[row, sink:].tolist() == [index + offset for index in range(sink, length)]
    lags_B = torch.tensor([row.lag for row in rows])
    output = glide(ids_BS, labels_BS, positions_BS, lag=lags_B)
    expected = [
        reference_loss(glide, ids_BS[row], labels_BS[row], positions_BS[row], lagged(length, rows[row].lag)) for row in range(2)
    ]
    compare(glide, output.loss, sum(expected) / (2 * (length - PROMPT)))


@pytest.mark.parametrize(("lag", "masked"), [(3, False), ("blocks", True)])
def test_packed_documents_are_as_if_alone(target_path: str, lag: int | str, masked: bool) -> None:
    """Whether or not the caller has masked each document's first label, which is the last one's of the document before."""
    glide = make(target_path)
    lengths = (23, 1, 41)
    documents = [torch.randint(0, VOCABULARY, (length,)) for length in lengths]
    ids_S = torch.cat([*documents, torch.zeros(5, dtype=torch.long)])
    labels_S, positions_S = ids_S.clone(), torch.cat([*(torch.arange(n) for n in lengths), torch.arange(5)])
    if masked:
        labels_S[torch.tensor([0, 23, 24])] = -100
    labels_S[65:] = -100
    positions_S[25:65] += 500  # the third document has an anchor and an offset
    document_ids_S = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([*lengths, 5]))
    loss = glide(
        ids_S[None], labels_S[None], position_ids=positions_S[None], lag=lag, document_ids=document_ids_S[None], num_labels=1
    ).loss
    expected, start = torch.zeros(()), 0
    for ids in documents:
        seen = blocked(len(ids), 4) if lag == "blocks" else lagged(len(ids), 3)
        expected = expected + reference_loss(glide, ids, ids, positions_S[start : start + len(ids)], seen)
        start += len(ids)
    compare(glide, loss, expected)


def test_a_later_token_changes_no_earlier_loss(target_path: str) -> None:
    """No leak: with labels up to token 30 only, tokens after it do not matter, in any lag mode."""
    glide = make(target_path)
    ids_BS = torch.randint(0, VOCABULARY, (1, 60))
    other_BS = ids_BS.clone()
    other_BS[:, 31:] = torch.randint(0, VOCABULARY, (1, 29))
    labels_BS = torch.full_like(ids_BS, -100)
    labels_BS[:, :31] = ids_BS[:, :31]
    for lag in (1, 4, "blocks"):
        torch.testing.assert_close(glide(ids_BS, labels_BS, lag=lag).loss, glide(other_BS, labels_BS, lag=lag).loss)


def test_target_loss_is_transformers_own(target_path: str) -> None:
    glide = make(target_path)
    ids_BS = torch.randint(0, VOCABULARY, (2, 40))
    eager = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(glide(ids_BS, ids_BS).llm_loss, eager(ids_BS, labels=ids_BS).loss, rtol=1e-4, atol=1e-5)
    assert glide(ids_BS, ids_BS, with_llm_loss=False).llm_loss is None
