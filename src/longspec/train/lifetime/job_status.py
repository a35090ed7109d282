"""status.json: how a training job stands or ended, and by what a repetition of it would be known.

    {"state": "running" | "done" | "stopped" | "failed", "step", "steps", "progress", "reason", "deterministic", "fingerprint"}

Exit codes do not survive the launchers in between (torchrun returns 1 whatever its workers return): this file does.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import longspec
from longspec.atomic_files import read_json, sha256_text, write_json
from longspec.config import plain
from longspec.distributed import Ranks, log
from longspec.lease import Fence
from longspec.methods.draft_files import draft_weights_file
from longspec.train.arguments import Job
from longspec.train.lifetime.admission import NonRetryableError, with_checkpoints
from longspec.train.names import STATUS


def reason_of(error: BaseException) -> str:
    """An error in words."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@contextmanager
def non_retryable() -> Iterator[None]:
    """Turn a ValueError into a NonRetryableError: wrong settings, data or weights are wrong in the next attempt too."""
    try:
        yield
    except ValueError as error:
        raise NonRetryableError(str(error)) from error


def _files_of(path: Path) -> list[Any]:
    """Name, size and time of the files beside a manifest, so that a repaired file lets a job start again."""
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(path.parent.iterdir()) if p.is_file()]


def _device() -> list[Any]:
    """The kind of the GPUs here: what one has no room for, another may have."""
    if not torch.cuda.is_available():
        return []
    properties = torch.cuda.get_device_properties(0)
    return [properties.name, properties.total_memory, torch.cuda.device_count()]


def fingerprint(job: Job, ranks: Ranks) -> str:
    """A hash of what decides whether a job fails in the same way again: settings, inputs, code, packages, GPU."""
    inputs = [job.target, job.data, *job.replay.values(), *([] if job.vocabulary is None else [job.vocabulary])]
    if job.target.is_file():
        inputs.append(Path(read_json(job.target)["path"]) / "config.json")
    if job.init_weights is not None:
        inputs.append(draft_weights_file(job.init_weights))
    stored = (job.states, job.held_out_states, *job.replay_states.values())
    manifests = [path for path in stored if path is not None and path.exists()]
    shards = [shard for path in manifests for shard in sorted(path.parent.glob("*/shard.json"))]
    times = [(path, path.stat()) for path in (*manifests, *shards)]
    sources = sorted(Path(longspec.__file__).parent.rglob("*.py"))
    content = {
        "recipe": plain(job.recipe),
        "runtime": plain(job.runtime),
        "world_size": ranks.world_size,
        "inputs": [_files_of(path) for path in inputs if path.exists()],
        "states": [[str(path), found.st_size, found.st_mtime_ns] for path, found in times],
        "packages": sorted(f"{package.name} {package.version}" for package in distributions()),
        "device": _device(),
        "code": [[source.stat().st_size, source.stat().st_mtime_ns] for source in sources],
    }
    return sha256_text(json.dumps(content, sort_keys=True))


class Status:
    """The writer of a job's status.json: rank 0, or for it the watchdog of another rank."""

    def __init__(self, out: Path, ranks: Ranks, job_fingerprint: str, fence: Fence | None = None) -> None:
        """fence: asked before each write, and ends this process when another job writes there."""
        self.out, self.ranks, self.job_fingerprint, self.fence = out, ranks, job_fingerprint, fence
        self.began_at: int | None = None
        self.step, self.steps = 0, 0

    def at(self, step: int, steps: int) -> None:
        """Note the step that is done, of how many."""
        if self.began_at is None:
            self.began_at = step
        self.step, self.steps = step, steps

    def write(self, state: str, reason: str = "", deterministic: bool = False) -> None:
        """Write the file: `progress` counts the steps of this attempt. A full disk is a warning and ends no job."""
        content = {
            "state": state,
            "reason": reason,
            "deterministic": deterministic,
            "step": self.step,
            "steps": self.steps,
            "progress": self.step - (self.began_at or 0),
            "fingerprint": with_checkpoints(self.out, self.job_fingerprint),
        }
        try:
            if self.fence is not None:
                self.fence.check()
            write_json(self.out / STATUS, content)
        except OSError as fault:
            log(f"WARNING {self.out / STATUS} could not be written: {fault}")

    def fail(self, error: BaseException) -> None:
        """Write down a failure."""
        if not self.ranks.is_main:
            return
        self.write("failed", reason_of(error), isinstance(error, NonRetryableError))
