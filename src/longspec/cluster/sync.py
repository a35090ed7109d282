"""Upload what trackers wrote offline, from a machine with internet: each folder by its tracker's own command.

The key and another server are the trackers' own matters: `wandb login`, WANDB_BASE_URL; `swanlab login`, SWANLAB_API_HOST.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from longspec.cluster.stages import folders, read_lease
from longspec.train.tracking import FOLDER, INSTALL

QUIET = {"WANDB_ERROR_REPORTING": "false"}  # wandb's reports about itself to its makers


@dataclass(frozen=True)
class Tracker:
    """How one tracker's folders are found, and by which of its options they are uploaded."""

    name: str
    pattern: str
    data: str  # of the file in it that counts; beside it stands a mark once it is uploaded
    options: Callable[[Path], list[str]]
    owner: str  # its option for whom the project belongs to

    def is_uploaded(self, folder: Path) -> bool:
        """Whether an earlier upload got to its end."""
        return any(folder.glob(f"{self.data}.synced"))


# swanlab sync takes the project from the folder, but makes up a new experiment each time unless it is given the run's id.
TRACKERS = (
    Tracker("wandb", "offline-run-*", "*.wandb", lambda folder: [], "--entity"),
    Tracker("swanlab", "run-*", "*.swanlab", lambda folder: ["--id", folder.name.split("-", 2)[2]], "--workspace"),
)


def written(results: Path) -> Iterator[tuple[Tracker, Path, bool]]:
    """Each tracker's folders below results, and whether a job still writes there."""
    for stage in sorted(folders(results, FOLDER)):
        lease = read_lease(stage)
        busy = lease is not None and lease.is_alive
        for tracker in TRACKERS:
            found = sorted((stage / FOLDER / tracker.name).glob(tracker.pattern))
            yield from ((tracker, folder, busy) for folder in found if any(folder.glob(tracker.data)))


def executable(name: str) -> str:
    """A tracker's command, on the PATH or beside this interpreter. Raises ValueError with what to install."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise ValueError(f"there is no command {name}: {INSTALL}")
    return found


def last_words(command: list[str], seconds: float) -> tuple[int, list[str]]:
    """A command's exit code and its lines. Raises ValueError when it takes longer."""
    # Not a pipe: wandb's helper process would hold it open after wandb itself has been ended.
    with tempfile.TemporaryFile() as output:
        try:  # without a terminal nobody is asked for a key
            done = subprocess.run(
                command, env=QUIET | os.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"not done after {seconds / 60:g} minutes (--minutes): is its server in reach?") from error
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    return done.returncode, [line.strip() for line in lines if line.strip()] or ["it said nothing"]


def upload(tracker: Tracker, folder: Path, options: argparse.Namespace) -> None:
    """Upload one folder and leave the mark of it. Raises ValueError with the tracker's last words."""
    chosen = ["--project", options.project] if options.project else []
    chosen += [tracker.owner, options.owner] if options.owner else []
    command = [executable(tracker.name), "sync", *tracker.options(folder), *chosen, str(folder)]
    code, words = last_words(command, 60 * options.minutes)
    # An exit code of 0 proves no upload: wandb ends with 0 and without its mark, swanlab with 0 and these words.
    unsaid = tracker.name == "wandb" and not tracker.is_uploaded(folder)
    if code or unsaid or any("Confirm sync finish failed" in line for line in words):
        raise ValueError(f"{words[-1]} (exit code {code})")
    for path in folder.glob(tracker.data):
        path.with_name(f"{path.name}.synced").touch()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster sync", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="say what would be uploaded")
    parser.add_argument("--project", help="another project than runtime.tracker_project")
    parser.add_argument("--owner", help="whose project: W&B's entity, SwanLab's workspace")
    parser.add_argument("--minutes", type=float, default=15.0, help="for each folder at most; default: %(default)g")
    return parser


def attempt(tracker: Tracker, folder: Path, options: argparse.Namespace) -> str:
    """Upload one folder and tell; why it failed, or nothing."""
    print(f"{tracker.name} {folder}: ", end="", flush=True)
    try:
        upload(tracker, folder, options)
    except (ValueError, OSError) as error:
        print("failed", flush=True)
        return f"{folder}: {error}"
    print("uploaded", flush=True)
    return ""


def main(argv: list[str]) -> int:
    """Upload folder after folder; 1 when one of them could not be."""
    options = parser().parse_args(argv)
    found = list(written(options.results))
    idle = [(tracker, folder) for tracker, folder, busy in found if not busy]
    waiting = [(tracker, folder) for tracker, folder in idle if not tracker.is_uploaded(folder)]
    if options.dry_run:
        print("".join(f"would upload {folder}\n" for _, folder in waiting), end="")
    failures = [] if options.dry_run else [why for item in waiting if (why := attempt(*item, options))]
    left = f"{len(idle) - len(waiting)} uploaded before, {len(found) - len(idle)} of running jobs left alone"
    if not waiting:
        print(f"nothing to upload below {options.results} ({left}); runtime.tracker_mode: offline leaves such folders")
    elif not options.dry_run:
        print(f"{len(waiting) - len(failures)} uploaded, {len(failures)} failed; {left}")
    for why in failures:
        print(f"error: {why}", file=sys.stderr)
    return 1 if failures else 0
