"""Send a training's numbers to the trackers of runtime.report_to after every step. Only this module uses their packages.

metrics.jsonl is the record, a tracker shows it. A resumed run continues under its old id: a tracker first gets the rows of the
record that it lacks, and no row that it has. docs/tracking.md says how each of them resumes, and where its files are.
"""

import math
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longspec.config import Runtime
from longspec.distributed import Ranks, log
from longspec.train.stage_folder import NonRetryableError

FINISH_SECONDS = 30  # most seconds to wait at the job's end for what a tracker has not uploaded
FINISH_AFTER_FAULT = 5  # torchrun kills this rank 30 seconds after another one has failed, and it must first report why
OFFLINE = "offline"  # a value of runtime.tracker_mode
FOLDER = "trackers"  # inside the stage's folder
INSTALL = "pip install -c constraints.txt -e '.[track]'"
Row = dict[str, Any]


# Each takes the arguments with which all services start (project, name, id, config, mode), the folder for its files, and the
# record's last step. Each has `known`, the last step that it holds; `log`, for steps in order; and `finish`, which closes the
# run.


class TensorBoard:
    """Write event files; each start of the job adds one to the folder, which cancels the steps after the resumed one."""

    def __init__(self, run: dict[str, Any], folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        own = folder / "tensorboard" / run["id"]
        self.known = step if own.is_dir() else 0  # older files hold the run's first steps
        self.writer = SummaryWriter(str(own), purge_step=self.known + 1)
        self.writer.add_text("config", f"<pre>{OmegaConf.to_yaml(OmegaConf.create(run['config']))}</pre>", self.known)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # steps that a checkpoint counts as done must not be lost with this process

    def finish(self, *, failed: bool) -> None:
        self.writer.close()


class WandB:
    """Log to a run on the server; offline, to a folder for each start of the job, which holds the whole run so far."""

    def __init__(self, run: dict[str, Any], folder: Path, step: int) -> None:
        # wandb reports errors to its makers, and contacts their server even in offline mode.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        offline = run["mode"] == OFFLINE
        # On a terminal wandb.init would ask for a key and wait.
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "no key on this machine: run `wandb login`, set WANDB_API_KEY, or upload an offline run with `wandb sync` later"
            )
        # What is not uploaded in this time stays on disk for `wandb sync`.
        settings = wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS)
        self.run = wandb.init(dir=str(folder), resume=None if offline else "allow", settings=settings, **run)
        self.known = self.run.starting_step - 1  # the server takes steps in order only, and drops earlier ones
        log(f"wandb: {self.run.dir if offline else self.run.url}")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def finish(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class SwanLab:
    """Log to a run on SwanLab's server, which drops steps that it has; offline, to a folder for each start, as WandB does."""

    def __init__(self, run: dict[str, Any], folder: Path, step: int) -> None:
        import swanlab

        self.known, own = 0, folder / "swanlab"
        own.mkdir(exist_ok=True)
        handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
        try:
            # Else it asks for a key and waits, and replaces stdout and stderr by its own streams.
            settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
            self.run = swanlab.init(log_dir=str(own), resume="allow", settings=settings, **run)
        finally:
            # It takes over Ctrl-C, which must save a checkpoint here.
            signal.signal(signal.SIGINT, handler)
            sys.excepthook = hook

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def finish(self, *, failed: bool) -> None:
        self.run.finish(state="aborted" if failed else "success")


TRACKERS: dict[str, Callable[[dict[str, Any], Path, int], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "swanlab": SwanLab,
}


def scalars(row: Row) -> dict[str, float]:
    """Return a row's finite numbers under the trackers' names: train/loss, held_out/loss."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, dict) else {f"train/{name}": value}
    flat.pop("train/step", None)
    return {name: float(v) for name, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}


def is_installed(package: str) -> bool:
    """Tell whether a package is installed. Importing it proves nothing: wandb's own folder of files is called wandb too."""
    return any(distributions(name=package))


def chosen(runtime: Runtime) -> list[str]:
    """Return the trackers that are asked for, without importing them. Raises ValueError if one is not installed."""
    names = [name for name in runtime.report_to if name != "none"]
    missing = [name for name in names if not is_installed(name)]
    if missing:
        raise ValueError(f"runtime.report_to: {', '.join(missing)} is not installed: {INSTALL}, or take it out")
    return names


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer. Works in the main thread alone, where SwanLab must be closed."""

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
    """Hold all trackers of a job, on rank 0 only. A context: leaving it closes them.

    ids: of an earlier start, from its checkpoint; None begins new runs. record: the rows of metrics.jsonl up to the resumed
    step. Raises ValueError, naming the tracker, if one cannot be started for the first time, NonRetryableError if a setting or
    a key is wrong. Later, a failing tracker loses its numbers but does not stop the training.
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
        self.trackers: dict[str, Any] = {}
        self.failed: set[str] = set()
        rows, known, folder = list(record), ids or {}, out.resolve() / FOLDER
        self.ids = {name: known.get(name) or secrets.token_hex(8) for name in chosen(runtime)} if ranks.is_main else {}
        shown = runtime.tracker_run or "/".join(out.resolve().parts[-3:])
        run = {"project": runtime.tracker_project, "name": shown, "config": config, "mode": runtime.tracker_mode}
        for name, run_id in self.ids.items():
            folder.mkdir(parents=True, exist_ok=True)
            step = rows[-1]["step"] if rows and name in known else 0
            # An offline run gets all steps again: folders of earlier starts, uploaded after it, would leave less of it.
            kept = {"wandb": "offline-run", "swanlab": "run"}.get(name)
            earlier = list(folder.glob(f"{name}/{kept}-*-{run_id}")) if kept and runtime.tracker_mode == OFFLINE else []
            try:
                self.trackers[name] = TRACKERS[name](run | {"id": run_id}, folder, step)
            except Exception as error:  # each service has its own kinds of errors
                if name in known:
                    log(f"WARNING {name} could not be started; metrics.jsonl has every step: {type(error).__name__}: {error}")
                    continue
                raise (NonRetryableError if isinstance(error, ValueError) else ValueError)(
                    f"runtime.report_to: {name} could not be started: {type(error).__name__}: {error}; set "
                    f"runtime.tracker_mode: offline, or take {name} out"
                ) from error
            for each in earlier:
                shutil.rmtree(each)
            for row in rows:
                self._send(name, row)

    def log(self, row: Row) -> None:
        """Send one step's row, as in metrics.jsonl."""
        for name in self.trackers:
            self._send(name, row)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for name, tracker in self.trackers.items():
            with at_most(FINISH_SECONDS if kind is None else FINISH_AFTER_FAULT):
                self._guarded(name, partial(tracker.finish, failed=kind is not None))

    def _send(self, name: str, row: Row) -> None:
        if row["step"] > self.trackers[name].known:
            self._guarded(name, partial(self.trackers[name].log, row["step"], scalars(row)))

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        """Call a service; if it fails, training goes on, and only its first failure is shown."""
        try:
            call()
        except Exception as error:
            if name not in self.failed:
                log(f"WARNING {name} failed; metrics.jsonl has every step: {type(error).__name__}: {error}")
            self.failed.add(name)
