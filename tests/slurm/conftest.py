"""A cluster, a small copy of the workflow on it, and its stage trained without Slurm to compare with."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, lacking
from tests.slurm.submitted import STAGE, TARGET_RULE, Submitted
from tests.workflow.planning import copy_to

# Little is computed: a step lasts as long as the test says, so that there is time for something to happen to it.
SMALL = {
    "config/model/demo.yaml": [
        (r"^ +- \{dataset: stdlib.*\n", ""),
        (r"vocabulary: \d+", "vocabulary: 400"),
        (r"hidden: \d+", "hidden: 32"),
        (r"layers: \d+", "layers: 2"),
        (r", steps: \d+", ", steps: 6"),
    ],
    "config/run/demo.yaml:base": [
        (r"name: stdlib", "name: puzzles"),
        (r"global_batch: \d+\n  steps: \d+", "global_batch: 8\n  steps: 60"),
        (r"micro_batch: \d+, save_every: \d+", "micro_batch: 2, save_every: 4, stop_margin_seconds: 5"),
    ],
    "config/workflow.yaml": [(r"records: \d+", "records: 200")],
    "src/longspec/lease.py": [(r"^STALE = [\d.]+", "STALE = 20.0")],  # two minutes are a test's longest part
    "src/longspec/train/__main__.py": [(r"^( +)(lr = engine)", r'\1time.sleep(float(open("pace").read()))\n\1\2')],
}
INPUTS = ["models/demo/target_manifest.json", "data/packed/demo/puzzles-base-128-split/manifest.json"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests for a real Slurm skip themselves where there can be none."""
    reason = lacking()
    for item in items:
        if reason and item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, up for all tests."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Submitted:
    """The workflow with small numbers and all that stage 1 reads."""
    folder = tmp_path_factory.mktemp("prepared") / "workflow"
    folder.mkdir()
    copy = copy_to(folder, root)
    shutil.copytree(root / "tests", copy.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in SMALL.items():
        for pattern, new in changes:
            copy.edit(name, pattern, new)
    prepared = Submitted(copy.folder)
    prepared.pace(0)
    prepared.make(*INPUTS, f"{STAGE}/recipe.yaml", f"{STAGE}/runtime.yaml")
    return prepared


@pytest.fixture(scope="session")
def undisturbed(prepared: Submitted, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """Stage 1 trained here, without Slurm, in two processes."""
    copy = prepared.copy(tmp_path_factory.mktemp("undisturbed") / "workflow")
    copy.make(TARGET_RULE, "--set-resources", "train:ranks=2")
    return copy


@pytest.fixture
def submitted(prepared: Submitted, cluster: Cluster, tmp_path: Path) -> Iterator[Submitted]:
    """A copy to send to the cluster; nothing of it is left there afterwards."""
    copy = prepared.copy(tmp_path / "workflow")
    copy.pace(0.5)
    yield copy
    copy.end_all()
    cluster.whole()
