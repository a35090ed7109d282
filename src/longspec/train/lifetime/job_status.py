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
from longspec.methods.draft_files import draft_weights_file
from longspec.train.arguments import Job
from longspec.train.lifetime.admission import DeterministicError, newest_manifest
from longspec.train.lifetime.lease import Fence
from longspec.train.names import CHECKPOINTS, STATUS


def reason_of(error: BaseException) -> str:
    """An error in words."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@contextmanager
def hopeless_if_invalid() -> Iterator[None]:
    """Turn a ValueError into a DeterministicError: faulty settings, data or weights would fail the next attempt too."""
    try:
        yield
    except ValueError as error:
        raise DeterministicError(str(error)) from error


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
    """A hash of what decides whether a job fails in the same way again: settings, inputs, checkpoints, code, packages, GPU.

    Of checkpoints it is what they were made with: to remove them, as a refusal advises, makes another job of it.
    """
    inputs = [job.target, job.data]
    if job.target.is_file():
        inputs.append(Path(read_json(job.target)["path"]) / "config.json")
    if job.init_weights is not None:
        inputs.append(draft_weights_file(job.init_weights))
    before = newest_manifest(job.out / CHECKPOINTS)
    sources = sorted(Path(longspec.__file__).parent.rglob("*.py"))
    content = {
        "recipe": plain(job.recipe),
        "runtime": plain(job.runtime),
        "world_size": ranks.world_size,
        "inputs": [_files_of(path) for path in inputs if path.exists()],
        "checkpoints": None if before is None else before["identity"],
        "packages": sorted(f"{package.name} {package.version}" for package in distributions()),
        "device": _device(),
        "code": [[source.stat().st_size, source.stat().st_mtime_ns] for source in sources],
    }
    return sha256_text(json.dumps(content, sort_keys=True))


class Status:
    """The writer of a job's status.json: rank 0, or for it the watchdog of another rank."""

    def __init__(self, out: Path, ranks: Ranks, print_of_job: str, fence: Fence | None = None) -> None:
        """fence: asked before each write, and ends this process when another job writes there."""
        self.path, self.ranks, self.fingerprint, self.fence = out / STATUS, ranks, print_of_job, fence
        self.began_at: int | None = None
        self.step, self.steps = 0, 0

    def at(self, step: int, steps: int) -> None:
        """Note the step that is done, of how many."""
        if self.began_at is None:
            self.began_at = step
        self.step, self.steps = step, steps

    def write(self, state: str, reason: str = "", deterministic: bool = False) -> None:
        """Write the file: `progress` are the steps this attempt has made. A full disk is logged and ends no job."""
        content = {
            "state": state,
            "reason": reason,
            "deterministic": deterministic,
            "step": self.step,
            "steps": self.steps,
            "progress": self.step - (self.began_at or 0),
            "fingerprint": self.fingerprint,
        }
        try:
            if self.fence is not None:
                self.fence.check()
            write_json(self.path, content)
        except OSError as fault:
            log(f"WARNING {self.path} could not be written: {fault}")

    def fail(self, error: BaseException) -> None:
        """Write down a failure."""
        if not self.ranks.is_main:
            return
        self.write("failed", reason_of(error), isinstance(error, DeterministicError))
