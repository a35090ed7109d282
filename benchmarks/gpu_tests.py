"""A plugin of pytest: keeps each test's outcome when the test ends, and leaves out those that have one.

    python -m pytest -p benchmarks.gpu_tests --kept FILE ...

A test during which pytest was killed runs once more; after the second time it has failed.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.jsonl import whole_lines

TWICE = "pytest was killed twice while it ran"


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """Return of each test its last outcome and its reason in a line."""
    lines = whole_lines(path)
    begun = Counter(line["test"] for line in lines if line["outcome"] == "begun")
    found = {line["test"]: (line["outcome"], line["why"]) for line in lines if line["outcome"] != "begun"}
    return {test: ("failed", TWICE) for test, times in begun.items() if times > 1} | found


class Keeper:
    """Writes the lines of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        jsonl.write(path, whole_lines(path))  # a kill may have torn the last one

    def add(self, test: str, outcome: str, why: str = "") -> None:
        """Write a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "why": why[:300]}) + "\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that have an outcome."""
        found = outcomes(self.path)
        left_out = [item for item in items if item.nodeid in found]
        items[:] = [item for item in items if item.nodeid not in found]
        config.hook.pytest_deselected(items=left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be read as a test that fails."""
        if report.failed:
            self.add(report.nodeid, "failed", report.longreprtext.strip().splitlines()[-1])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test has begun."""
        self.add(nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how its call ended, or that it never came to that."""
        if report.when != "call" and report.passed:
            return
        why: Any = report.longrepr
        if isinstance(why, tuple):  # of a skipped test
            why = why[-1]
        elif why is not None:
            why = getattr(getattr(why, "reprcrash", None), "message", str(why)).partition("\n")[0]
        self.add(report.nodeid, report.outcome, why or "")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--kept", type=Path, help="the file of lines, one when a test begins and one when it ends")


def pytest_configure(config: pytest.Config) -> None:
    """Begin where a file is given."""
    if config.getoption("kept"):
        config.pluginmanager.register(Keeper(config.getoption("kept")))
