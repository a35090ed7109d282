"""Which failures are told to stay, and a disk without room."""

import subprocess
import sys
from pathlib import Path

import torch

from longspec.distributed import Ranks
from longspec.train.lifetime.admission import NonRetryableError, non_retryable_reason
from longspec.train.lifetime.job_status import Status

ONE = Ranks(0, 0, 1)


def test_what_may_go_away_by_itself_is_tried_again(tmp_path: Path) -> None:
    Status(tmp_path, ONE).fail(NonRetryableError("wandb is not installed"))
    assert non_retryable_reason(tmp_path, 0) == "wandb is not installed"
    Status(tmp_path, ONE).fail(torch.OutOfMemoryError("other processes held 70 GiB"))
    assert non_retryable_reason(tmp_path, 0) == ""


def test_a_full_disk_under_log_and_status_ends_no_job() -> None:
    """Both write to a device without room."""
    lines = [
        "from pathlib import Path",
        "from longspec.distributed import Ranks, log",
        "from longspec.train.lifetime.job_status import Status",
        "import longspec.train.lifetime.job_status as status, os",
        "def full(*_): raise OSError(28, 'No space left on device')",
        "status.write_json = full",
        "log('one')",
        "Status(Path('x'), Ranks(0, 0, 1)).write('running')",
        "log('two')",
        "os._exit(7)",
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 7, done.stderr
