"""A training's numbers, sent to the trackers of runtime.report_to after every optimizer step.

metrics.jsonl is the record, a tracker shows it. A resumed run goes on under its old id: a tracker is first sent the rows
of the record that it lacks, and no row that it has.
"""

import math
import secrets
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from longspec.config import Runtime
from longspec.distributed import Ranks, log
from longspec.train.trackers import FINISH_SECONDS, Run, Tracker, start

FOLDER = "trackers"  # below the stage's folder
INSTALL = "pip install -c constraints.txt -e '.[track]'"
Row = dict[str, Any]


def scalars(row: Row) -> dict[str, float]:
    """A row's numbers by the names trackers group them under: train/loss, phases/data. What was not measured is left out."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, dict) else {f"train/{name}": value}
    flat.pop("train/step", None)
    return {name: float(v) for name, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}


def is_installed(package: str) -> bool:
    """Whether a package is there. Its name alone proves nothing: wandb's own folder of files is called wandb too."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def chosen(runtime: Runtime) -> list[str]:
    """The trackers that are asked for; none of them is imported. Raises ValueError for one that is not installed."""
    names = [name for name in runtime.report_to if name != "none"]
    missing = [name for name in names if not is_installed(name)]
    if missing:
        raise ValueError(f"runtime.report_to: {', '.join(missing)} is not installed: {INSTALL}, or take it out")
    return names


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; in the main thread alone."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a job; none on any rank but 0. A context: leaving it closes them.

    `ids` are what `state()` of an earlier start returned, kept in its checkpoint; None begins new runs. `record` are the
    rows of metrics.jsonl up to the resumed step. Raises ValueError, by name, when one cannot be started; once started, a
    tracker that fails costs its numbers and not the training.
    """

    def __init__(
        self,
        runtime: Runtime,
        out: Path,
        ranks: Ranks,
        config: dict[str, Any],
        ids: dict[str, str] | None = None,
        record: Iterable[Row] = (),
    ) -> None:
        self.trackers: dict[str, Tracker] = {}
        self.lost: dict[str, int] = {}  # calls that failed
        rows, ids = list(record), ids or {}
        self._ids = {name: ids.get(name) or secrets.token_hex(8) for name in chosen(runtime)} if ranks.is_main else {}
        for name, run_id in self._ids.items():
            run = Run(
                id=run_id,
                name=runtime.tracker_run or "/".join(out.resolve().parts[-3:]),
                project=runtime.tracker_project,
                offline=runtime.tracker_mode == "offline",
                folder=out.resolve() / FOLDER,
                step=rows[-1]["step"] if rows and name in ids else 0,
                config=config,
            )
            self.trackers[name], self.lost[name] = start(name, run), 0
            for row in rows:
                self._send(name, row)
            self._guarded(name, self.trackers[name].replayed)

    def log(self, row: Row) -> None:
        """One step's row, as in metrics.jsonl."""
        for name in self.trackers:
            self._send(name, row)

    def state(self) -> dict[str, str]:
        """Each tracker's run id, for the checkpoint."""
        return dict(self._ids)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, tracker in self.trackers.items():
            with at_most(FINISH_SECONDS):
                self._guarded(name, partial(tracker.finish, failed=kind is not None))
            if self.lost[name]:
                log(f"WARNING {name}: {self.lost[name]} calls failed; metrics.jsonl has every step")
        self.trackers.clear()

    def _send(self, name: str, row: Row) -> None:
        if row["step"] > self.trackers[name].known:
            self._guarded(name, partial(self.trackers[name].log, row["step"], scalars(row)))

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        """A service that is down must not end a training of days: the first failure is shown, all are counted."""
        try:
            call()
        except Exception as error:
            self.lost[name] += 1
            if self.lost[name] == 1:
                log(f"WARNING {name} failed, the training goes on without it: {type(error).__name__}: {error}")
