"""Tiny targets with random weights, and stand-ins of kernels for GPUs."""

import pytest
from torch.nn.attention.flex_attention import flex_attention

from longspec.models.attention import flash, flex
from tests.models import flash_stand_in
from tests.random_targets import any_target_path, seeded, target_path

__all__ = ["any_target_path", "seeded", "stand_ins", "target_path"]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's stand-in, and flex_attention without its minute of compiling."""
    monkeypatch.setattr(flash, "package", lambda: flash_stand_in)
    monkeypatch.setattr(flex, "compiled", lambda: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
