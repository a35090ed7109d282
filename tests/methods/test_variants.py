"""The recipe's switches: every value trains with every other, for every kind of text it may meet."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from longspec.methods.glide.attach import attach
from longspec.methods.glide.method import draw_row, shift_positions
from longspec.methods.glide.settings import ANCHORS, BLOCKS, LAG_MODES, LOSSES, Draft
from longspec.methods.glide.trainer import Glide
from tests.targets import TARGETS, VOCABULARY

LENGTHS = (9, 1, 30)  # of the documents in each row
# Every pair of anchors, lag mode and loss; windows and final norms in turn.
PAIRS = [(a, g, LOSSES[(ANCHORS.index(a) + LAG_MODES.index(g)) % 3]) for a, g in itertools.product(ANCHORS, LAG_MODES)]
COMBINATIONS = [(*pair, (8, 512)[place % 2], place % 4 > 1) for place, pair in enumerate(PAIRS)]


def draw(draft: Draft, rows: int) -> tuple[Tensor, Tensor | str]:
    """Positions [B, S] and lag of one micro batch, as the trainer draws them."""
    plain_S = np.concatenate([np.arange(length) for length in LENGTHS])
    draws = [draw_row(draft, 42, 0, row, sum(LENGTHS), 4096) for row in range(rows)]
    positions_BS = torch.from_numpy(np.stack([shift_positions(plain_S, one) for one in draws]))
    return positions_BS, BLOCKS if draft.lag_mode == "blocks" else torch.tensor([one.lag for one in draws])


def losses_of_two_steps(glide: Glide) -> list[float]:
    """The loss before and after one step down the gradient, on the same rows."""
    ids_BS = torch.randint(0, VOCABULARY, (2, sum(LENGTHS)))
    documents_BS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).expand_as(ids_BS)
    labels_BS = ids_BS.masked_fill(torch.arange(sum(LENGTHS)) % 3 == 0, -100)
    positions_BS, lag = draw(glide.draft_settings, 2)
    optimizer, losses = torch.optim.SGD(glide.draft_model.parameters(), lr=1e-2), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = glide(ids_BS, labels_BS, positions_BS, lag=lag, document_ids=documents_BS).loss
        loss.backward()
        for name, parameter in glide.draft_model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any(), name
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(path: str, draft: Draft) -> Glide:
    torch.manual_seed(3)
    glide = attach(path, dtype=torch.float32, draft=draft)
    for parameter in glide.draft_model.parameters():  # fresh biases are zero, and hide what is wrong with them
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return glide


@pytest.mark.parametrize(("anchors", "lag_mode", "loss", "window", "final_norm"), COMBINATIONS)
def test_every_pair_of_values_trains(
    target_path: str, anchors: str, lag_mode: str, loss: str, window: int, final_norm: bool
) -> None:
    draft = Draft(anchors=anchors, lag_mode=lag_mode, loss=loss, window=window, final_norm=final_norm, lag=3)
    before, after = losses_of_two_steps(make(target_path, draft))
    assert after < before


def test_every_family_trains(any_target_path: str) -> None:
    before, after = losses_of_two_steps(make(any_target_path, Draft(anchors="fixed", lag_mode="random")))
    assert after < before


def test_a_final_norm_starts_as_the_targets_own_and_is_trained(target_path: str) -> None:
    glide = attach(target_path, dtype=torch.float32, draft=Draft(anchors="off", lag_mode="fixed", final_norm=True))
    own = glide.draft_model.final_layernorm.weight
    assert torch.equal(own, glide.model.norm.weight)
    assert own.data_ptr() != glide.model.norm.weight.data_ptr()
    assert own.requires_grad
    assert "final_layernorm.weight" in glide.draft_model.state_dict()


def test_a_final_norm_stands_between_draft_and_head(target_path: str) -> None:
    """Scaling the draft's last hidden states changes nothing any more."""
    glide = make(target_path, Draft(anchors="off", lag_mode="fixed", loss="hard", final_norm=True))
    ids_BS = torch.randint(0, VOCABULARY, (1, 20))
    plain = glide(ids_BS, ids_BS).loss
    glide.draft_model.final_layernorm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    torch.testing.assert_close(glide(ids_BS, ids_BS).loss, plain, rtol=1e-4, atol=1e-5)


def test_every_family_is_among_the_targets() -> None:
    from longspec.methods.glide.settings import FAMILIES

    assert {config.model_type for config in TARGETS.values()} == set(FAMILIES)
