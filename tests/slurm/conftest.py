"""A cluster, a small copy of the workflow on it, and its stage trained without Slurm to compare with."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.slurm.cluster import Cluster, lacking
from tests.slurm.submitted import STAGE, Submitted
from tests.workflow.planning import copy_to

# Half a second a step, so that there is time for something to happen to it; cores without AVX-512 take twice as long for a row.
ROWS = 32 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 16
SMALL = {
    "config/model/demo.yaml": [(r"hidden: \d+", "hidden: 32"), (r"layers: \d+", "layers: 2"), (r", steps: \d+", ", steps: 6")],
    "config/run/demo.yaml:base": [
        (r"sequence_length: \d+", "sequence_length: 512"),
        (r"global_batch: \d+\n  steps: \d+", f"global_batch: {ROWS}\n  steps: 120"),
        (r"micro_batch: \d+, save_every: \d+", "micro_batch: 2, save_every: 4, stop_margin_seconds: 5"),
    ],
    "config/workflow.yaml": [(r"records: \d+", "records: 200")],
    "src/longspec/lease.py": [(r"^STALE = [\d.]+", "STALE = 60.0")],  # two minutes are a test's longest part
}
INPUTS = ["models/demo/target_manifest.json", "data/packed/demo/stdlib-base-512-split/manifest.json"]


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
    files = [*INPUTS, f"{STAGE}/recipe.yaml", f"{STAGE}/runtime.yaml"]
    prepared.finish(prepared.popen([sys.executable, "-m", "snakemake", *files, "--cores", "2"]))
    return prepared


@pytest.fixture(scope="session")
def undisturbed(prepared: Submitted, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """Stage 1 trained here, without Slurm, in two processes."""
    copy = prepared.copy(tmp_path_factory.mktemp("undisturbed") / "workflow")
    copy.train_locally("--set-resources", "train:ranks=2")
    return copy


@pytest.fixture
def submitted(prepared: Submitted, cluster: Cluster, tmp_path: Path) -> Iterator[Submitted]:
    """A copy to send to the cluster; nothing of it is left there afterwards."""
    copy = prepared.copy(tmp_path / "workflow")
    yield copy
    copy.end_all()
    cluster.whole()
