"""Tests in an unmodified vLLM skip themselves where it, or the draft that it is to load, is not there."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (".venv-serve/.stamp", "results/demo-eagle3/ttt/final_draft/provenance.json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-serve` makes both, and says why where it cannot."""
    missing = [name for name in NEEDED if not (ROOT / name).is_file()]
    for item in items:
        if missing and item.get_closest_marker("serve"):
            item.add_marker(pytest.mark.skip(reason=f"{missing[0]} is missing: make test-serve"))
