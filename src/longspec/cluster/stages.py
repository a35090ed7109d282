"""Read the state of trained stages from their folders, though files are torn or missing. No torch; Slurm is not asked."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from longspec import lease
from longspec.atomic_files import read_json_object
from longspec.cluster.queue import QueuedJob
from longspec.cluster.retry_policy import begun
from longspec.config import ConfigError, stages_of
from longspec.train.checkpoint import checkpoint_dir
from longspec.train.stage_folder import STATUS

DEPTH = 3  # results/{run}/{variant}/{stage}; experiments started by hand lie less deep
TAIL_BYTES, TAIL_ROWS = 2**16, 20
NOT_STARTED = ("PENDING", "CONFIGURING")


@dataclass
class Stage:
    """One stage's folder at one moment. What could not be read is missing, and named in `troubles`.

    jobs: this user's, None where Slurm is not asked or gives no answer. holder: the job that holds the folder, or held it last,
    as its lease file says; silent: seconds since it was last heard of, by two machines' clocks, which decides nothing.
    """

    name: str  # demo/sinkpi-slicing/long
    folder: Path
    jobs: Sequence[QueuedJob] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    holder: lease.LeaseFile | None = None
    is_mine: bool = True  # held by a process of this user: Slurm may hide other users' jobs
    silent: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)  # the last ones of its metrics
    saved: int | None = None  # the last checkpoint's step
    saved_ago: float | None = None
    total: int | None = None
    attempts: int = 0
    log: Path | None = None
    troubles: list[str] = field(default_factory=list)

    @property
    def job_id(self) -> str | None:
        """The Slurm job that holds its folder, or held it last."""
        job = self.holder.holder.get("job") if self.holder else None
        return str(job) if job else None

    @property
    def job(self) -> QueuedJob | None:
        """Its job in the queue: the one that holds its folder, else one that the executor sent for it.

        The executor puts the rule and its wildcards into the job's comment. Another clone of the same user may train stages of
        the same names.
        """
        comment = f"rule_train_wildcards_{self.name.replace('/', '_')}"
        found = [job for job in self.jobs or () if job.id == self.job_id or (job.comment == comment and self._is_below(job))]
        return max(found, key=lambda job: job.id == self.job_id, default=None)

    def _is_below(self, job: QueuedJob) -> bool:
        return bool(job.workdir) and self.folder.resolve().is_relative_to(Path(job.workdir).resolve())

    @property
    def is_alive(self) -> bool:
        """Tell whether a job still writes into the stage's folder, by its lease and by Slurm."""
        if self.holder is None or self.holder.is_released or self.silent > lease.STALE:
            return False
        if self.jobs is None or self.job_id is None or not self.is_mine:
            return True
        return any(job.id == self.job_id for job in self.jobs)

    @property
    def state(self) -> str:
        """How it stands: what its job wrote down last, unless that job has ended or hangs without a word, then `silent`."""
        written, job = str(self.status.get("state")), self.job
        if self.is_alive:
            return "done" if written == "done" else "running"
        if job and job.state in NOT_STARTED:
            return "queued"
        if job and job.id != self.job_id:
            return "running"  # it starts: the folder is still its predecessor's
        if (self.folder / "checkpoint.json").is_file():
            return "done"
        if written == "running":
            return "silent"
        if written in ("stopped", "failed", "done"):
            return written
        return "waiting" if self.saved is None else "stopped"

    @property
    def step(self) -> int:
        """The step that it has reached, or where it goes on: a job that does not run goes on from its checkpoint."""
        if self.state == "done" and self.total:
            return self.total
        return int(self.rows[-1]["step"]) if self.state == "running" and self.rows else self.saved or 0

    @property
    def seconds_left(self) -> float | None:
        """The time that its other steps take; None where it is not known, and for a finished stage."""
        pace = self.middle("seconds")
        if pace is None or self.total is None or self.state == "done":
            return None
        return max(0, self.total - self.step) * pace

    def middle(self, name: str) -> float | None:
        """Return the median of a number in the last rows."""
        values = [row[name] for row in self.rows if isinstance(row.get(name), int | float)]
        return median(values) if values else None


@cache
def _order(run: str) -> list[str]:
    try:
        return stages_of(run)
    except ConfigError:  # a run of another checkout, or an experiment by hand
        return []


def _place(stage: Stage) -> tuple[Any, ...]:
    """Return where a stage comes in the table: by run and variant, then as config/run/{run}.yaml trains its stages.

    Where that file is gone or says nothing of the stage, by the time at which its recipe was frozen.
    """
    *parents, last = stage.name.split("/")
    order = _order(parents[0]) if parents else []
    number = order.index(last) if last in order else len(order)
    return parents, number, (stage.folder / "recipe.yaml").stat().st_mtime, last


def find(results: Path, jobs: Sequence[QueuedJob] | None = None) -> list[Stage]:
    """Return all stages below a folder, those of a run in the order in which they are trained."""
    folders = [path.parent for depth in range(DEPTH + 1) for path in results.glob("*/" * depth + "recipe.yaml")]
    names = {folder: folder.relative_to(results).as_posix() for folder in folders}
    stages = (read(folder, folder.name if name == "." else name, results, jobs) for folder, name in names.items())
    return sorted(stages, key=_place)


def read(folder: Path, name: str, results: Path, jobs: Sequence[QueuedJob] | None = None) -> Stage:
    """Read the state of one stage from its folder and its logs."""
    stage = Stage(name, folder, jobs)
    try:
        stage.status = read_json_object(folder / STATUS) if (folder / STATUS).exists() else {}
    except (ValueError, OSError) as error:
        stage.troubles.append(str(error))
    try:
        stage.holder, owner = lease.read(folder), (folder / lease.LEASE).stat().st_uid
        stage.is_mine = owner == os.getuid()
        stage.silent = max(0.0, time.time() - stage.holder.beat / 1e9) if stage.holder else 0.0
    except OSError:
        pass
    stage.rows = _last_rows(folder)
    _read_checkpoint(stage)
    steps = stage.status.get("steps")  # 0 until the first step of an attempt is known
    stage.total = steps if isinstance(steps, int) and steps > 0 else stage.total
    logs = results.parent / "logs/train" / name
    link = logs.with_name(f"{logs.name}.log")
    stage.attempts = begun(link, (folder / "recipe.yaml").stat().st_mtime)  # at the recipe that is frozen now
    stage.log = max(logs.glob("attempt-*.log"), default=link if link.is_file() else None)
    return stage


def _last_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the last rows, of the end of the file alone: the whole of it is large after days. A torn line is left out."""
    final, growing = folder / "metrics.jsonl", folder / "checkpoints/metrics.jsonl"
    try:
        with (final if final.is_file() else growing).open("rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - TAIL_BYTES))
            rows = [_row(line) for line in handle.read().split(b"\n")]
    except OSError:
        return []
    return [row for row in rows if row is not None][-TAIL_ROWS:]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _read_checkpoint(stage: Stage) -> None:
    """Read the newest slot whose manifest is whole; the large files beside it are not looked at."""
    for name in checkpoint_dir.SLOTS:
        slot = stage.folder / "checkpoints" / name
        try:
            manifest = checkpoint_dir.read_manifest(slot)
            stage.saved, stage.total = int(manifest["step"]), int(manifest["steps"])
            stage.saved_ago = max(0.0, time.time() - (slot / checkpoint_dir.MANIFEST).stat().st_mtime)
            return
        except FileNotFoundError:  # rotated away at this moment
            continue
        except (ValueError, KeyError, TypeError, OSError) as error:
            if slot.exists():
                stage.troubles.append(str(error) if str(slot) in str(error) else f"{slot}: {type(error).__name__}: {error}")
