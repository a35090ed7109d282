"""What a forward refuses, and by which name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longspec.config import compose
from longspec.families import position_limit
from longspec.methods.glide.attach import attach
from longspec.methods.glide.trainer import LlamaGlide, Qwen2Glide
from longspec.states.declaration import checked_config
from tests.targets import TARGETS, save_target

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def glide(tmp_path_factory: pytest.TempPathFactory) -> Qwen2Glide:
    return attach(save_target("qwen2", tmp_path_factory.mktemp("target")), dtype=torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lag": 0}, "lag: 0: must be 1 or more"),
        ({"lag": torch.tensor([1, 2, 3])}, r"lag: must be int64 \[2\], one for each row, is torch\.int64 \[3\]"),
        ({"lag": "block"}, "lag: 'block' is unknown; give an int, a tensor .B. or 'blocks'"),
    ],
)
def test_a_wrong_lag_dies_by_name(glide: Qwen2Glide, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glide(**{"input_ids": IDS, "labels": IDS} | arguments)


def test_a_class_refuses_another_family(tmp_path: Any) -> None:
    path = save_target("qwen3", tmp_path)
    for family in (LlamaGlide, Qwen2Glide):
        with pytest.raises(ValueError, match=f"model_type 'qwen3' is not supported by {family.__name__}"):
            family.from_pretrained(path)


def test_rows_longer_than_the_targets_positions_are_refused(tmp_path: Path) -> None:
    recipe = compose("train", ["run=demo", "variant=base", "stage=base", "recipe.data.sequence_length=4097"]).recipe
    with pytest.raises(ValueError, match=r"^recipe\.data\.sequence_length: 4097 tokens are more than the target.s 4096"):
        checked_config(save_target("qwen2", tmp_path), recipe)


def test_positions_reach_as_far_as_yarn_stretches_them() -> None:
    assert position_limit(TARGETS["qwen2"]) == 4096
    assert position_limit(TARGETS["qwen2-yarn"]) == 4096  # 4 x 1024
    stretched = type(TARGETS["qwen2"])(
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert position_limit(stretched) == 131072
