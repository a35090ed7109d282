"""Reads the state of trained stages from their folders, though files are torn or missing. No torch; Slurm is not asked."""

import json
import os
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from longspec import lease as leases
from longspec.atomic_files import read_json_object
from longspec.cluster.retry_policy import begun
from longspec.config import ConfigError, stages_of
from longspec.train.checkpoint import checkpoint_dir
from longspec.train.lifetime.admission import STATUS

DEPTH = 3  # results/{run}/{variant}/{stage}; experiments started by hand lie less deep
TAIL_BYTES, TAIL_ROWS = 2**16, 20


@dataclass(frozen=True)
class Lease:
    """The job that holds a stage's folder, or held it last, as its lease file tells."""

    job: str | None  # Slurm's id
    place: str
    released: bool
    silent: float  # seconds since its holder was last heard of
    mine: bool  # held by a process of this user

    @property
    def is_alive(self) -> bool:
        """Whether its holder still writes."""
        return not self.released and self.silent <= leases.STALE


@dataclass
class Stage:
    """One stage's folder at one moment. What could not be read is missing, and named in `troubles`."""

    name: str  # demo/sinkpi-slicing/long
    folder: Path
    status: dict[str, Any] = field(default_factory=dict)
    lease: Lease | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # the last ones of its metrics
    saved: int | None = None  # the last checkpoint's step
    saved_ago: float | None = None
    total: int | None = None
    finished: bool = False
    attempts: int = 0
    log: Path | None = None
    troubles: list[str] = field(default_factory=list)

    def middle(self, name: str) -> float | None:
        """The median of a number in the last rows."""
        values = [row[name] for row in self.rows if isinstance(row.get(name), int | float)]
        return median(values) if values else None


@cache
def _order(run: str) -> list[str]:
    try:
        return stages_of(run)
    except ConfigError:  # a run of another checkout, or an experiment by hand
        return []


def _place(stage: Path, name: str) -> tuple[Any, ...]:
    """Where a stage comes in the table: by run and variant, then as config/run/{run}.yaml trains its stages.

    Where that file is gone or says nothing of the stage, by the time at which its recipe was frozen.
    """
    *parents, last = name.split("/")
    order = _order(parents[0]) if parents else []
    return parents, order.index(last) if last in order else len(order), (stage / "recipe.yaml").stat().st_mtime, last


def find(results: Path) -> list[Stage]:
    """All stages below a folder, those of a run in the order in which they are trained."""
    found = [path.parent for depth in range(DEPTH + 1) for path in results.glob("*/" * depth + "recipe.yaml")]
    named = {folder: folder.relative_to(results).as_posix() for folder in found}
    named = {folder: folder.name if name == "." else name for folder, name in named.items()}
    return [read(folder, named[folder], results) for folder in sorted(named, key=lambda folder: _place(folder, named[folder]))]


def read(folder: Path, name: str, results: Path) -> Stage:
    """Reads the state of one stage from its folder and its logs."""
    stage = Stage(name, folder, finished=(folder / "checkpoint.json").is_file())
    stage.status, stage.lease = _object(folder / STATUS, stage.troubles), read_lease(folder)
    _read_rows(stage)
    _read_checkpoint(stage)
    steps = stage.status.get("steps")  # 0 until the first step of an attempt is known
    stage.total = steps if isinstance(steps, int) and steps > 0 else stage.total
    _read_attempts(stage, results.parent / "logs/train" / name)
    return stage


def _object(path: Path, troubles: list[str]) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.exists() else {}
    except (ValueError, OSError) as error:
        troubles.append(str(error) if str(path) in str(error) else f"{path}: {error}")
        return {}


def read_lease(folder: Path) -> Lease | None:
    """The lease of a stage's folder, None when there is none.

    Its age is told by two machines' clocks, which is good enough to look at and decides nothing.
    """
    try:
        found = leases.read(folder)
        owner = (folder / leases.LEASE).stat().st_uid
    except OSError:
        return None
    if found is None:
        return None
    job, silent = found.holder.get("job"), max(0.0, time.time() - found.beat / 1e9)
    return Lease(str(job) if job else None, str(found), bool(found.holder.get("released")), silent, owner == os.getuid())


def _read_rows(stage: Stage) -> None:
    """The last rows, of the end of the file alone: the whole of it is large after days."""
    final, growing = stage.folder / "metrics.jsonl", stage.folder / "checkpoints/metrics.jsonl"
    path = final if final.is_file() else growing
    try:
        with path.open("rb") as handle:
            start = max(0, handle.seek(0, os.SEEK_END) - TAIL_BYTES)
            handle.seek(start)
            *lines, torn = handle.read().split(b"\n")
    except OSError:
        return
    rows = [_row(line) for line in lines[1 if start else 0 :]]
    stage.rows = [row for row in rows if row is not None][-TAIL_ROWS:]
    if None in rows:
        stage.troubles.append(f"{path}: {rows.count(None)} of its last {len(rows)} lines cannot be read")
    if torn and not (stage.lease and stage.lease.is_alive):  # else it is being written at this moment
        stage.troubles.append(f"{path}: its last line is torn, as a kill leaves it; the next attempt drops it")


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _read_checkpoint(stage: Stage) -> None:
    """The newest slot whose manifest is whole; the large files beside it are not looked at."""
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


def _read_attempts(stage: Stage, folder: Path) -> None:
    """Count the attempts at the recipe that is frozen now, and find the newest one's log."""
    logs = sorted(folder.glob("attempt-*.log"))
    link = folder.with_name(f"{folder.name}.log")
    stage.attempts = begun(link, (stage.folder / "recipe.yaml").stat().st_mtime)
    stage.log = logs[-1] if logs else link if link.is_file() else None
