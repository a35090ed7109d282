"""A packed row costs, token by token, what its documents cost alone: through the real draft and targets of both families."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import PackedRows, Row
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, LlamaGlide, Qwen2Glide
from tests.data.test_pack import write_shards

FAMILIES: dict[str, tuple[type[PretrainedConfig], type[Glide]]] = {
    "qwen2": (Qwen2Config, Qwen2Glide),
    "llama": (LlamaConfig, LlamaGlide),
}
LENGTHS = [9, 14, 3, 2, 31, 70, 6, 11]
ROW = 32


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    """Rows of the packer: short documents together, and a long one split."""
    folder = tmp_path_factory.mktemp("rows")
    tokens, _ = write_shards(folder / "tokens", LENGTHS)
    packing.make(tokens, ROW, "long-nomask", "split", folder / "packed" / "manifest.json")
    return PackedRows(folder / "packed" / "manifest.json")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def glide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Glide:
    torch.manual_seed(7)
    config, family = FAMILIES[request.param]
    shape = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    made = config(**shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    folder: Path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    settings = Draft(window=6, anchors="off", lag_mode="fixed", lag=2, loss="mix")
    built = family.from_pretrained(str(folder), dtype=torch.float32, draft=settings)
    for parameter in built.draft_model.parameters():  # away from the special points of a fresh layer
        torch.nn.init.normal_(parameter, std=0.2)
    return built


def losses(glide: Glide, row: Row, lag: int | str, document_ids: torch.Tensor | None) -> list[float]:
    """The draft's loss on each label of a row, one at a time, and the target's."""
    ids, positions = (torch.from_numpy(each.astype(np.int64))[None] for each in (row.input_ids_S, row.position_ids_S))
    costs = []
    for place in np.flatnonzero(row.loss_mask_S):
        labels = torch.full_like(ids, -100)
        labels[0, place] = ids[0, place]
        with torch.no_grad():
            output = glide(ids, labels, positions, lag, document_ids=document_ids, num_labels=1)
        costs += [output.loss.item(), output.llm_loss.item()]
    return costs


@pytest.mark.parametrize("lag", [1, 3, "blocks"])
def test_a_packed_row_costs_what_its_documents_cost_alone(glide: Glide, rows: PackedRows, lag: int | str) -> None:
    packed = [row for row in map(rows.__getitem__, range(len(rows))) if len(row.records) > 1]
    assert len(packed) >= 2
    for row in packed:
        expected = []
        for document in range(len(row.records)):
            inside = row.document_ids_S == document
            each = (row.input_ids_S, row.loss_mask_S, row.document_ids_S, row.position_ids_S)
            expected += losses(glide, Row(*(array[inside] for array in each), records=[0]), lag, None)
        document_ids = torch.from_numpy(row.document_ids_S.astype(np.int64))[None]
        assert losses(glide, row, lag, document_ids) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_without_boundaries_it_would_cost_something_else(glide: Glide, rows: PackedRows) -> None:
    """The test above can fail: the same row taken for one document costs differently."""
    row = next(row for row in map(rows.__getitem__, range(len(rows))) if len(row.records) > 1)
    document_ids = torch.from_numpy(row.document_ids_S.astype(np.int64))[None]
    assert losses(glide, row, 1, document_ids) != pytest.approx(losses(glide, row, 1, None), rel=1e-3)
