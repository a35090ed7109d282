"""Which failures a job does not run into twice, and what makes it try again."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longspec.atomic_files import write_json
from longspec.config import compose
from longspec.distributed import Ranks
from longspec.train.arguments import Job
from longspec.train.lifetime import job_status
from longspec.train.lifetime.admission import NonRetryableError, refuse_repetition
from longspec.train.lifetime.job_status import Status, fingerprint
from tests.train.checkpoint.test_save_load import write_slot

ONE = Ranks(0, 0, 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    config = compose("train", ["run=demo"])
    (tmp_path / "target").mkdir()
    write_json(tmp_path / "target/config.json", {"model_type": "qwen2"})
    write_json(tmp_path / "models/target_manifest.json", {"path": str(tmp_path / "target")})
    write_json(tmp_path / "data/manifest.json", {})
    target, data = tmp_path / "models/target_manifest.json", tmp_path / "data/manifest.json"
    return Job(config.recipe, config.runtime, target, data, None, tmp_path / "out")


class Package:
    name, version = "wandb", "1"


REPAIRS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "an installed package": lambda _, patch: patch.setattr(job_status, "distributions", lambda: [Package()]),
    "another GPU": lambda _, patch: patch.setattr(job_status, "_device", lambda: ["H200", 141, 8]),
    "the target's files": lambda folder, _: write_json(folder / "target/config.json", {"model_type": "llama"}),
    "the data": lambda folder, _: write_json(folder / "data/manifest.json", {"rows": 1}),
}


@pytest.mark.parametrize("repair", REPAIRS)
def test_a_repair_lets_it_start_again(job: Job, tmp_path: Path, repair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Status(job.out, ONE, fingerprint(job, ONE))
    failed.fail(NonRetryableError("wandb is not installed"))
    with pytest.raises(NonRetryableError, match=r"wandb is not installed \(so it failed before"):
        refuse_repetition(job.out, fingerprint(job, ONE))
    REPAIRS[repair](tmp_path, monkeypatch)
    refuse_repetition(job.out, fingerprint(job, ONE))


def test_a_failure_with_checkpoints_is_known_again_until_they_are_removed(job: Job) -> None:
    """Those that the job has saved itself, and those of another recipe, whose removal a refusal advises."""
    failed = Status(job.out, ONE, fingerprint(job, ONE))
    write_slot(job.out / "checkpoints/last", 20)
    failed.fail(NonRetryableError("refused"))
    with pytest.raises(NonRetryableError, match="so it failed before"):
        refuse_repetition(job.out, fingerprint(job, ONE))
    (job.out / "checkpoints/last").rename(job.out / "checkpoints/last_2")  # as a save that is cut off leaves it
    with pytest.raises(NonRetryableError, match="so it failed before"):
        refuse_repetition(job.out, fingerprint(job, ONE))
    shutil.rmtree(job.out / "checkpoints")
    refuse_repetition(job.out, fingerprint(job, ONE))


def test_what_may_go_away_by_itself_is_tried_again(job: Job) -> None:
    Status(job.out, ONE, fingerprint(job, ONE)).fail(torch.OutOfMemoryError("other processes held 70 GiB"))
    refuse_repetition(job.out, fingerprint(job, ONE))


def test_a_full_disk_under_log_and_status_ends_no_job(job: Job) -> None:
    """Both write to a device without room."""
    lines = [
        "from pathlib import Path",
        "from longspec.distributed import Ranks, log",
        "from longspec.train.lifetime.job_status import Status",
        "import longspec.train.lifetime.job_status as status, os",
        "def full(*_): raise OSError(28, 'No space left on device')",
        "status.write_json = full",
        "log('one')",
        "Status(Path('x'), Ranks(0, 0, 1), 'f').write('running')",
        "log('two')",
        "os._exit(7)",
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 7, done.stderr
