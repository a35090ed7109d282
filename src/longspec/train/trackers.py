"""The services a training's numbers go to: TensorBoard, Weights & Biases, SwanLab. The one door to their packages.

How each of them resumes a run, and where its files lie: docs/tracking.md.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longspec.distributed import log

FINISH_SECONDS = 30  # at most, for what a tracker has not uploaded yet when the job ends


@dataclass(frozen=True)
class Run:
    """A run as a tracker is given it at its start."""

    id: str
    name: str
    project: str
    offline: bool
    folder: Path  # for its files
    step: int  # the record ends here
    config: dict[str, Any]  # shown beside the curves


class NoKeyError(ValueError):
    """A service whose key is not on this machine."""


class TensorBoard:
    """Event files; one more in the same folder for each start of the job, which takes back the steps after the resumed one.

    known, of every tracker: the last step that it holds. Steps come in order.
    """

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" / run.id
        self.known = run.step if folder.is_dir() else 0
        self.writer = SummaryWriter(str(folder), purge_step=self.known + 1)
        self.writer.add_text("config", f"<pre>{OmegaConf.to_yaml(OmegaConf.create(run.config))}</pre>", self.known)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Written through at once: what a checkpoint counts as done must not be lost with this process."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def replayed(self) -> None:
        """Called once the whole record of earlier steps was sent; here older files of the run hold its first steps."""

    def finish(self, *, failed: bool) -> None:
        """Close the file."""
        self.writer.close()


class WandB:
    """A run on the server; offline, a folder for each start of the job that holds the whole run so far."""

    def __init__(self, run: Run) -> None:
        # wandb reports on itself to its makers, and looks for their server even when it is to stay offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # On a terminal wandb.init would ask for a key and wait.
        if not run.offline and not wandb.login(prompt=False, verify=False):
            raise NoKeyError(
                "runtime.report_to: wandb has no key on this machine: run `wandb login`, set WANDB_API_KEY, or set"
                " runtime.tracker_mode: offline and upload with `wandb sync` later"
            )
        self.offline = run.offline
        run.folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            config=run.config,
            dir=str(run.folder),
            mode="offline" if run.offline else "online",
            resume=None if run.offline else "allow",
            settings=wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS),
        )
        self.known = self.run.starting_step - 1  # the server takes steps in order alone, and drops those it has passed
        log(f"wandb: {self.run.dir if run.offline else self.run.url}")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Handed to wandb's own process, which uploads or writes it."""
        self.run.log(numbers, step=step)

    def replayed(self) -> None:
        """Drop the folders of earlier starts: uploaded after this one, each would replace the run by less of it."""
        if self.offline:
            _remove_others(Path(self.run.dir).parent, f"offline-run-*-{self.run.id}")

    def finish(self, *, failed: bool) -> None:
        """Finish the run within FINISH_SECONDS; what was not uploaded by then stays on the disk for `wandb sync`."""
        self.run.finish(exit_code=int(failed))


class SwanLab:
    """A run on SwanLab's server; offline, a folder for each start of the job that holds the whole run so far."""

    def __init__(self, run: Run) -> None:
        import swanlab

        self.offline, self.folder = run.offline, run.folder / "swanlab"
        self.folder.mkdir(parents=True, exist_ok=True)
        handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
        try:
            self.run = swanlab.init(
                project=run.project,
                name=run.name,
                id=run.id,
                config=run.config,
                log_dir=str(self.folder),
                mode="offline" if run.offline else "online",
                resume="allow",
                # Else it asks for a key and waits, and puts its own streams in the place of stdout and stderr.
                settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
            )
        finally:
            # It takes Ctrl-C for itself, which must save a checkpoint here.
            signal.signal(signal.SIGINT, handler)
            sys.excepthook = hook
        self.known = 0  # it drops steps that its server has, by itself

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Handed to SwanLab's own threads."""
        self.run.log(numbers, step=step)

    def replayed(self) -> None:
        """Drop the folders of earlier starts, which hold less of the run than this one."""
        if self.offline:
            _remove_others(self.folder / self.run.dir.name, f"run-*-{self.run.id}")

    def finish(self, *, failed: bool) -> None:
        """Wait for its threads."""
        self.run.finish(state="aborted" if failed else "success")


def _remove_others(own: Path, pattern: str) -> None:
    """Remove the folders of this pattern that lie beside a run's own."""
    for folder in own.parent.glob(pattern):
        if folder.name != own.name:
            shutil.rmtree(folder)


Tracker = TensorBoard | WandB | SwanLab
TRACKERS: dict[str, Callable[[Run], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "swanlab": SwanLab}


def start(name: str, run: Run) -> Tracker:
    """A started tracker. Raises ValueError with the way out when it cannot be."""
    try:
        return TRACKERS[name](run)
    except NoKeyError:
        raise
    except Exception as error:  # each service has its own kinds
        raise ValueError(
            f"runtime.report_to: {name} could not be started: {type(error).__name__}: {error}; set runtime.tracker_mode:"
            f" offline, or take {name} out"
        ) from error
