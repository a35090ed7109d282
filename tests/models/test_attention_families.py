"""Whole drafts beside their targets on every backend, with anchors and packed documents, against eager attention.

Shapes: B rows, S tokens, H hidden width, K key/value heads, D head width.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from longspec.methods.glide.settings import BLOCKS, Draft
from longspec.methods.glide.trainer import Glide, LlamaGlide, Qwen2Glide
from longspec.models.attention import flash, flex, sdpa
from longspec.models.attention.backends import FLASH, FLEX, SDPA
from tests.eager import EAGER
from tests.models import flash_stand_in

LENGTH = 60
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden / heads
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
DRAFTED = {"qwen2": (Qwen2Config, Qwen2Glide), "llama": (LlamaConfig, LlamaGlide)}
# Two rows of three documents each and padding; the second row's documents lie elsewhere.
DOCUMENTS = ((23, 1, 31, 5), (11, 40, 6, 3))


@pytest.fixture(autouse=True)
def small_blocks_and_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 16)
    monkeypatch.setattr(flash, "package", lambda: flash_stand_in)
    monkeypatch.setattr(flex, "compiled", lambda dynamic: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def saved(folder: Path, config: PretrainedConfig) -> str:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=sorted(DRAFTED))
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Family and folder of a target."""
    return request.param, saved(tmp_path_factory.mktemp(request.param), DRAFTED[request.param][0](**SHAPE))


def document_ids_BS() -> Tensor:
    numbers = torch.tensor([0, 1, 2, -1])
    return torch.stack([torch.repeat_interleave(numbers, torch.tensor(row)) for row in DOCUMENTS])


def positions_BS(*, packed: bool, anchors: bool) -> Tensor:
    """Each document from 0; with anchors the tokens after the first few jump, by another offset in each row."""
    rows = []
    for row, lengths in enumerate(DOCUMENTS if packed else ((LENGTH,), (LENGTH,))):
        positions_S = torch.cat([torch.arange(length) for length in lengths])
        rows.append(torch.where(anchors & (positions_S > row + 2), positions_S + 1000 + 500 * row, positions_S))
    return torch.stack(rows)


def build(drafted: tuple[str, str], backend: str) -> Glide:
    family, path = drafted
    torch.manual_seed(3)
    settings = Draft(window=10, anchors="off", lag_mode="random", loss="mix")
    glide = DRAFTED[family][1].from_pretrained(path, dtype=torch.float32, draft=settings, attention=backend)
    for parameter in glide.draft_model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return glide


@pytest.mark.parametrize(("packed", "anchors", "lag"), [(False, True, None), (True, False, "rows"), (True, True, BLOCKS)])
@pytest.mark.parametrize("backend", [SDPA, FLASH, FLEX])
def test_a_draft_is_the_same_on_every_backend(
    drafted: tuple[str, str], backend: str, packed: bool, anchors: bool, lag: str | None
) -> None:
    torch.manual_seed(11)
    ids_BS = torch.randint(0, 97, (2, LENGTH))
    labels_BS = ids_BS.clone()
    labels_BS[:, :7] = -100
    arguments: dict[str, Any] = {
        "position_ids": positions_BS(packed=packed, anchors=anchors),
        "document_ids": document_ids_BS() if packed else None,
        "lag": torch.tensor([1, 4]) if lag == "rows" else lag,
    }
    if packed:
        labels_BS[arguments["document_ids"] == -1] = -100
    results = []
    for name in (EAGER, backend):
        glide = build(drafted, name)
        with torch.set_grad_enabled(backend != FLEX):
            output = glide(ids_BS, labels_BS, **arguments)
        gradients = torch.autograd.grad(output.loss, list(glide.draft_model.parameters())) if backend != FLEX else ()
        results.append([output.loss, output.llm_loss, *gradients])
    for left, right in zip(*results, strict=True):
        assert (left - right).norm() <= 1e-5 * right.norm() + 1e-7
