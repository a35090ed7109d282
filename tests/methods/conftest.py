"""Tiny targets with random weights, and norms as the references have them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.models.conftest import stand_ins
from tests.random_targets import any_target_path, seeded, target_path

__all__ = ["any_target_path", "exact_norms", "seeded", "stand_ins", "target_path"]


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norm rounds to float32 on the way."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
