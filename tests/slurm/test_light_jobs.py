"""Tokenizing and the preflight, on a real Slurm."""

import json

import pytest

from tests.slurm.submitted import Submitted

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_preflight_on_two_nodes(submitted: Submitted) -> None:
    submitted.set("nodes", 2)
    for stage in ("long", "longcot"):  # whose two rows no four ranks could share
        submitted.edit(f"config/run/demo.yaml:{stage}", r"global_batch: 2", "global_batch: 4")
    submitted.finish(submitted.start("preflight"))
    log = (submitted.folder / "logs/preflight/demo.log").read_text()
    assert ", 0 failed" in log
    report = json.loads((submitted.folder / "results/demo/preflight.json").read_text())
    assert "n1" in json.dumps(report)
    assert "n2" in json.dumps(report)
