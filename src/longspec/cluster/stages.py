"""Read the state of trained stages from their folders, at any moment. No torch; Slurm is not asked."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from longspec import lease
from longspec.atomic_files import read_json
from longspec.cluster.attempt_logs import attempts, begun
from longspec.slurm import QueuedJob
from longspec.train.checkpoint import checkpoint_dir
from longspec.train.stage_folder import STATUS

DEPTH = 3  # results/{run}/{variant}/{stage}; experiments started by hand lie less deep
TAIL_BYTES, TAIL_ROWS = 2**16, 20
NOT_STARTED = ("PENDING", "CONFIGURING")


@dataclass
class Stage:
    """Hold one stage's folder at one moment.

    jobs: this user's jobs, None if Slurm was not asked or gave no answer. holder: the job that holds the folder, or held it
    last, by its lease file. silent: seconds since its last beat, by the clocks of two machines.
    """

    name: str  # demo/sinkpi-slicing/long
    folder: Path
    jobs: Sequence[QueuedJob] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    holder: lease.LeaseFile | None = None
    silent: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)  # the last rows of its metrics
    saved: int | None = None  # the last checkpoint's step
    saved_ago: float | None = None
    total: int | None = None
    recipe: dict[str, Any] | None = None  # of the last checkpoint
    attempts: int = 0
    log: Path | None = None

    @property
    def job_id(self) -> str | None:
        """Return the Slurm job that holds its folder, or held it last; None if there was none."""
        job = self.holder.holder.get("job") if self.holder else None
        return str(job) if job else None

    @property
    def job(self) -> QueuedJob | None:
        """Return its job in the queue: the one that holds its folder, else one that the executor sent for it.

        The executor puts the rule and its wildcards into the job's comment. Another clone of the same user may train stages of
        the same names, so the job's folder counts too.
        """
        comment, folder = f"rule_train_wildcards_{self.name.replace('/', '_')}", self.folder.resolve()
        sent = [job for job in self.jobs or () if job.comment == comment and job.workdir]
        found = [job for job in sent if folder.is_relative_to(Path(job.workdir).resolve())]
        return next((job for job in self.jobs or () if job.id == self.job_id), found[0] if found else None)

    @property
    def state(self) -> str:
        """Return what its job wrote last, or `silent` if that job wrote `running` and has ended or hangs.

        A job with a fresh lease counts as alive, also a killed one for two minutes.
        """
        written, job = str(self.status.get("state")), self.job
        if self.holder and not self.holder.is_released and self.silent <= lease.STALE:
            return "done" if written == "done" else "running"
        if job and job.state in NOT_STARTED:
            return "queued"
        if job and job.id != self.job_id:
            return "running"  # it is starting: the lease is still its predecessor's
        if (self.folder / "checkpoint.json").is_file():
            return "done"
        if written == "running":
            return "silent"
        if written in ("stopped", "failed", "done"):
            return written
        return "waiting" if self.saved is None else "stopped"

    @property
    def step(self) -> int:
        """Return the step that it has reached; while its job does not run, the step of its checkpoint, where it goes on."""
        if self.state == "done" and self.total:
            return self.total
        return int(self.rows[-1]["step"]) if self.state == "running" and self.rows else self.saved or 0

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds that its remaining steps take; None if unknown, and for a finished stage."""
        pace = self.middle("seconds")
        if pace is None or self.total is None or self.state == "done":
            return None
        return max(0, self.total - self.step) * pace

    def middle(self, name: str) -> float | None:
        """Return the median of a number in the last rows; None if no row has it."""
        values = [row[name] for row in self.rows if isinstance(row.get(name), int | float)]
        return median(values) if values else None


def find(results: Path, jobs: Sequence[QueuedJob] | None = None) -> list[Stage]:
    """Return all stages below a folder, sorted by name."""
    folders = [path.parent for depth in range(DEPTH + 1) for path in results.glob("*/" * depth + "recipe.yaml")]
    names = {folder: folder.relative_to(results).as_posix() for folder in folders}
    stages = (read(folder, folder.name if name == "." else name, results, jobs) for folder, name in names.items())
    return sorted(stages, key=lambda stage: stage.name.split("/"))


def read(folder: Path, name: str, results: Path, jobs: Sequence[QueuedJob] | None = None) -> Stage:
    """Read the state of a stage from its folder and logs; what is damaged or may not be read counts as missing."""
    stage = Stage(name, folder, jobs)
    with suppress(ValueError, OSError):
        stage.status = read_json(folder / STATUS)
    with suppress(OSError):
        stage.holder = lease.read(folder)
    stage.silent = max(0.0, time.time() - stage.holder.beat / 1e9) if stage.holder else 0.0
    stage.rows = _last_rows(folder)
    for slot in (folder / checkpoint_dir.CHECKPOINTS / name for name in checkpoint_dir.SLOTS):
        try:
            manifest = checkpoint_dir.read_manifest(slot)
            stage.saved_ago = max(0.0, time.time() - (slot / checkpoint_dir.MANIFEST).stat().st_mtime)
        except (OSError, ValueError):  # missing, rotated away just now, or damaged, which the trainer will report
            continue
        stage.saved, stage.total, stage.recipe = manifest["step"], manifest["steps"], manifest["identity"].get("recipe")
        break
    stage.total = stage.status.get("steps") or stage.total  # 0 until the first step of an attempt is known
    log = results.parent / "logs/train" / f"{name}.log"
    stage.attempts = begun(log, (folder / "recipe.yaml").stat().st_mtime)  # since the present recipe was frozen
    stage.log = max(attempts(log), default=log if log.is_file() else None)
    return stage


def _last_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the last rows, read from the end of the file, since all of it is large after days. Torn lines are left out."""
    final, growing = folder / "metrics.jsonl", folder / "checkpoints/metrics.jsonl"
    rows: list[dict[str, Any]] = []
    with suppress(OSError), (final if final.is_file() else growing).open("rb") as handle:
        handle.seek(max(0, handle.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in handle.read().split(b"\n"):
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows[-TAIL_ROWS:]
