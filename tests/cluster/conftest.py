"""Fixtures of the cluster's tests."""

from pathlib import Path

import pytest

from tests.cluster.queue import Queue


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A squeue of our own, to be told what it says."""
    stand_in = Queue(tmp_path / "bin")
    monkeypatch.setenv("PATH", stand_in.path())
    return stand_in
