"""What a forward refuses, and by which name."""

from typing import Any

import pytest
import torch

from longspec.families import position_limit
from longspec.methods.glide.attach import attach
from longspec.methods.glide.trainer import LlamaGlide, Qwen2Glide
from tests.targets import TARGETS, save_target

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def glide(tmp_path_factory: pytest.TempPathFactory) -> Qwen2Glide:
    return attach(save_target("qwen2", tmp_path_factory.mktemp("target")), dtype=torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lag": 0}, r"lag: 0 lies outside 1\.\."),
        ({"lag": torch.tensor([1, 2, 3])}, r"lag: must be int64 \[2\], one for each row, is torch\.int64 \[3\]"),
        ({"lag": "block"}, "lag: 'block' is unknown; give an int, a tensor .B. or 'blocks'"),
        ({"labels": IDS[:1]}, r"labels: must be int64 \[2, 6\] like input_ids, is torch\.int64 \[1, 6\]"),
        ({"labels": IDS + 90}, r"labels: 101 lies outside 0\.\.96"),
        ({"input_ids": IDS[0]}, r"input_ids: must be int64 \[B, S\], is torch\.int64 \[6\]"),
        ({"input_ids": IDS.int()}, r"input_ids: must be int64 \[B, S\], is torch\.int32 \[2, 6\]"),
        ({"input_ids": IDS + 86}, r"input_ids: 97 lies outside 0\.\.96 \(the target's vocabulary\)"),
        ({"position_ids": IDS + 4090}, r"position_ids: 4101 lies outside 0\.\.4095 \(the target's max_position_embeddings\)"),
        ({"document_ids": IDS[:, 1:]}, r"document_ids: must be int64 \[2, 6\] like input_ids, is torch\.int64 \[2, 5\]"),
        ({"input_ids": IDS[:, :0], "labels": IDS[:, :0]}, r"input_ids: holds no token, is \[2, 0\]"),
        ({"num_labels": 0}, r"num_labels: must be above 0, is 0"),
    ],
)
def test_wrong_inputs_die_by_name(glide: Qwen2Glide, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glide(**{"input_ids": IDS, "labels": IDS} | arguments)


def test_the_outermost_values_are_accepted(glide: Qwen2Glide) -> None:
    ids = torch.tensor([[0, 96, 5]])
    output = glide(ids, torch.tensor([[-100, 0, 96]]), torch.tensor([[0, 1, 4095]]), lag=400)
    assert torch.isfinite(output.loss)


def test_a_row_without_labels_or_of_one_token_costs_nothing(glide: Qwen2Glide) -> None:
    for ids in (IDS, IDS[:, :1]):
        output = glide(ids, torch.full_like(ids, -100))
        output.loss.backward()
        assert output.loss == 0
        assert output.llm_loss == 0


def test_a_class_refuses_another_family(tmp_path: Any) -> None:
    path = save_target("qwen3", tmp_path)
    for family in (LlamaGlide, Qwen2Glide):
        with pytest.raises(ValueError, match=f"model_type 'qwen3' is not supported by {family.__name__}"):
            family.from_pretrained(path)


def test_positions_reach_as_far_as_yarn_stretches_them() -> None:
    assert position_limit(TARGETS["qwen2"]) == 4096
    assert position_limit(TARGETS["qwen2-yarn"]) == 4096  # 4 x 1024
    stretched = type(TARGETS["qwen2"])(
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert position_limit(stretched) == 131072
