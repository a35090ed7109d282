"""Fixtures with random targets, for the rooms whose conftest.py names them."""

import pytest
import torch

from tests.targets import TARGETS, save_target


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not hang on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=["qwen2", "llama"])
def target_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a saved target of the two families of published drafts."""
    return save_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session", params=sorted(TARGETS))
def any_target_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same for every family and peculiarity."""
    return save_target(request.param, tmp_path_factory.mktemp(request.param))
