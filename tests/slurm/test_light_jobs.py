"""Tokenizing and the preflight, on a real Slurm."""

import json
import re

import pytest

from tests.slurm.submitted import Submitted

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SHARDS = [f"data/tokens/demo/puzzles/{shard:03d}.json" for shard in range(3)]


def test_each_shard_of_a_dataset_is_a_job(submitted: Submitted) -> None:
    submitted.edit("config/workflow.yaml", r"^(  puzzles: .*\bshards: )\d+", r"\g<1>3")
    text = submitted.finish(submitted.start(*SHARDS))
    assert len(re.findall(r"Job \d+ has been submitted with SLURM jobid .*rule_tokenize", text)) == len(SHARDS)
    manifests = [json.loads((submitted.folder / shard).read_text()) for shard in SHARDS]
    assert [manifest["shard"] for manifest in manifests] == [0, 1, 2]


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
