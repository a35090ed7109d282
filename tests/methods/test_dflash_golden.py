"""DFlash's training against what the package `speculators` 0.9.0 makes of the same weights and packed rows.

tests/golden/dflash/make.py says how its numbers were made. Three things differ, and are brought to one formula without touching
either loss. Theirs is a divergence, ours a cross entropy: the target's own entropy, a constant, lies between them. Theirs
divides by the labels of the blocks, ours by `num_labels`; ours has weights that add up to 1, and counts each of the drawn
anchors for all that there could be. Ours leaves out where the target prefers a token outside the draft vocabulary: their mask
names the same.

Shapes: S tokens, A blocks, W slots of a block, R slots with a label, H hidden width, T target's vocabulary, V draft vocabulary.
"""

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec.methods.dflash.method import METHOD
from longspec.methods.dflash.settings import Settings
from longspec.methods.dflash.trainer import DFlashTrainer
from tests.eager import EAGER
from tests.methods.test_eagle3_golden import Golden, check_gradients, teacher_of

FILE = Path(__file__).parents[1] / "golden/dflash/speculators.safetensors"
K_NORM = "layers.{}.self_attn.k_norm.weight"
pytestmark = [pytest.mark.parametrize("draft", ["full", "reduced"]), pytest.mark.parametrize("attention", [EAGER, "sdpa"])]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.read(FILE)


@pytest.fixture
def made(golden: Golden, draft: str, attention: str) -> DFlashTrainer:
    shape = golden.about["shape"] | {"layers": tuple(golden.about["shape"]["layers"])} | golden.about["drafts"][draft]
    return golden.trainer(METHOD, Settings(**shape), draft, attention)


def arguments(row: dict[str, Tensor]) -> dict[str, Any]:
    """Of a training forward, whose anchors are theirs."""
    ids_S, numbers_S = row["ids"], row["documents"]
    starts = [int((numbers_S == number).nonzero()[0]) for number in numbers_S]
    positions_S = torch.arange(len(ids_S)) - torch.tensor(starts)
    return {
        "input_ids": ids_S[None],
        "labels": ids_S.where(row["trained"], -100)[None],
        "position_ids": positions_S[None],
        "document_ids": numbers_S[None],
        "priority": torch.zeros(1, len(ids_S)).index_fill(1, row["anchors"], 1.0),
    }


@pytest.mark.parametrize("number", ["0", "1"])
def test_logits_loss_and_gradients_are_theirs(golden: Golden, draft: str, made: DFlashTrainer, number: str) -> None:
    row, layer = golden.below(draft, number), made.draft_model
    made.settings = settings = replace(made.settings, anchors=len(row["anchors"]))
    rows: list[Tensor] = []
    with layer.norm.register_forward_hook(lambda _, __, out: rows.append(out)):
        output = made(**arguments(row), num_labels=1)
    head_VH = made.states.head_weight if layer.lm_head is None else layer.lm_head.weight
    places_AK = row["anchors"][:, None] + torch.arange(1, settings.block_size)
    trained_AK = row["trained"][places_AK]
    torch.testing.assert_close(rows[0] @ head_VH.T, row["logits"][:, 1:][trained_AK], rtol=0, atol=1e-4)

    parts = [teacher_of(made, row["ids"][row["documents"] == document]) for document in row["documents"].unique()]
    entropy_S, is_inside_S = (torch.cat(each) for each in zip(*parts, strict=True))
    counts_AK = trained_AK & is_inside_S[places_AK - 1]
    assert counts_AK.sum() == row["count"]
    weights_K = torch.tensor([exp(-slot / settings.gamma) for slot in range(settings.predicted)])
    starts = row["documents"][1:] == row["documents"][:-1]
    anchors_there_can_be = (row["trained"][1:] & starts).sum()
    scale = weights_K.sum() * len(row["anchors"]) / anchors_there_can_be / row["count"]
    own = (weights_K * entropy_S[places_AK - 1] * counts_AK).sum() / row["count"]
    torch.testing.assert_close(output.loss * scale - own, row["loss"], rtol=1e-4, atol=0)

    wanted = golden.below(draft, number, "gradient")
    if settings.tied_k_norm:
        wanted[K_NORM.format(0)] = sum(wanted.pop(K_NORM.format(number)) for number in range(settings.depth))
    check_gradients(layer, output.loss * scale, wanted, 1e-4)
