"""Copies of the workflow: untouched, and with everything built."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from tests.workflow.planning import Settings, Workflow, build_all, copy_to


@pytest.fixture
def settings(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A copy of config/, in whose folder the test runs."""
    shutil.copytree(root / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    return Settings(tmp_path)


@pytest.fixture
def workflow(tmp_path: Path, root: Path) -> Workflow:
    """A copy in which nothing is built."""
    return copy_to(tmp_path, root)


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A copy in which every output is there and recorded as built, made by the first of the workers."""
    temporary = tmp_path_factory.getbasetemp()
    folder = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "built"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            build_all(copy_to(folder, root))
    return folder


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Workflow:
    """A copy of it to work in."""
    shutil.copytree(built_once, tmp_path / "built", symlinks=True)
    return Workflow(tmp_path / "built")
