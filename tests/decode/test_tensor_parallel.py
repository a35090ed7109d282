"""A target split over ranks decodes what one rank decodes, token by token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from tests.decode.models import METHODS, SHAPE
from tests.decode.parallel_program import texts
from tests.jobs import finish, start, torchrun

# A vocabulary that no number of ranks divides, and so small that random drafts are kept now and then.
SMALL: dict[str, Any] = SHAPE | {"vocab_size": 11, "hidden_size": 64, "num_hidden_layers": 3, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a target with four key/value heads, its head tied to its embeddings."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(Qwen2Config(**SMALL | HEADS | {"tie_word_embeddings": True})).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(target: str) -> dict[str, Any]:
    """What one rank decodes, as JSON tells it."""
    whole = load_target(target, read_target_config(target), torch.float64)
    return json.loads(json.dumps(texts(whole)))


@pytest.mark.slow
def test_every_rank_decodes_what_one_alone_decodes(root: Path, target: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """By all methods, greedy and drawn, plainly and as answers. Rank 1 would draw otherwise, and takes rank 0's tokens."""
    ranks, apart, program = 2, 1, str(root / "tests/decode/parallel_program.py")
    text, code = finish(start([*torchrun(ranks), program, str(tmp_path), str(apart), target], tmp_path))
    assert code == 0, text
    whole = sum(tensor.numel() for tensor in load_target(target, read_target_config(target), torch.float64).parameters())
    for rank in range(ranks):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["texts"] == alone
        assert 0.9 * whole / ranks < told["split"] < 1.1 * whole / ranks
    accepted = [kept for key, rows in alone.items() if key.startswith(METHODS) for _, row in rows for kept in row]
    assert {0, 1, 2} <= set(accepted), "texts in which drafts were kept and rejected"
