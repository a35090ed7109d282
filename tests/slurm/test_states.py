"""Shards of stored states as jobs on a real Slurm, one of them cancelled, and a draft trained from them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from longspec.atomic_files import sha256_file
from longspec.train.checkpoint.save_load import draft_state_dict
from tests.slurm.cluster import Cluster
from tests.slurm.submitted import Submitted, equal, state_of
from tests.workflow.planning import copy_to

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
RUN = "demo-eagle3-offline"
STAGE = f"results/{RUN}/ttt/base"
ROWS = "data/packed/demo/stdlib-base-512-split/manifest.json"
SMALL = {
    "config/model/demo.yaml": [(r"hidden: \d+", "hidden: 32"), (r", steps: \d+", ", steps: 6")],
    "config/run/demo-eagle3.yaml:base": [(r"steps: 560", "steps: 12"), (r"save_every: \d+", "save_every: 4")],
    "config/workflow.yaml": [
        (r"records: \d+", "records: 200"),
        (r"stdlib: \{source: stdlib,", "stdlib: {source: stdlib, min_characters: 80000,"),
        (r"^keep_states: false", "keep_states: true"),
    ],
}
TWO = [f"{rule}:ranks=2" for rule in ("build_states", "held_out_states", "train")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Submitted:
    """Small numbers, and all that the states are made of."""
    folder = tmp_path_factory.mktemp("states") / "workflow"
    folder.mkdir()
    copy = copy_to(folder, root)
    shutil.copytree(root / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    copy.edit("config/workflow.yaml", r"^runs: \[.*?\]", f"runs: [{RUN}]")
    for name, changes in SMALL.items():
        for pattern, new in changes:
            copy.edit(name, pattern, new)
    prepared = Submitted(folder)
    locally(prepared, ROWS, f"results/{RUN}/ttt/draft_vocabulary_768.json")
    return prepared


def locally(copy: Submitted, *arguments: str) -> None:
    """Without Slurm."""
    copy.finish(copy.popen(["snakemake", "--cores", "2", *arguments]))


def stored(copy: Submitted) -> dict[str, str]:
    """The hashes of all states, and of what is said of them."""
    (folder,) = (copy.folder / "data/states/demo/stdlib-base-512-split").iterdir()
    files = [path for path in folder.rglob("*") if path.name.startswith(("rows-", "contents"))]
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}


def test_a_cancelled_job_of_a_shard_ends_with_the_same_states(prepared: Submitted, cluster: Cluster, tmp_path: Path) -> None:
    undisturbed, submitted = (prepared.copy(tmp_path / name) for name in ("undisturbed", "submitted"))
    locally(undisturbed, f"{STAGE}/checkpoint.json", "--set-resources", *TWO)
    process = submitted.start(f"{STAGE}/checkpoint.json")
    try:
        parts: list[Path] = []

        def one_builds() -> bool:
            parts[:] = submitted.folder.glob("data/states/demo/*/*/0-of-2/lease.json")
            return bool(parts)

        submitted.wait_until(one_builds, process)
        folder = submitted.folder.joinpath(
            "logs/build_states", *parts[0].relative_to(submitted.folder / "data/states").parts[:4]
        )
        (log,) = folder.glob("attempt-*.log")
        job = log.stem.split("-job-")[1]
        subprocess.run(["scancel", job], check=True)
        submitted.finish(process)
    finally:
        submitted.end_all()
        cluster.whole()
    assert state_of(job) in ("CANCELLED", "FAILED")
    assert len(list(folder.glob("attempt-*.log"))) == 2
    found = stored(submitted)
    assert sum(name.endswith(".safetensors") for name in found) >= 3
    assert found == stored(undisturbed)
    assert equal(*(draft(copy) for copy in (submitted, undisturbed)))


def draft(copy: Submitted) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    return draft_state_dict(copy.folder / STAGE / "checkpoints/last")
