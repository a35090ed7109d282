"""Upload what trackers wrote offline, from a machine with internet: each folder by its tracker's own command.

The key and another server are the trackers' own matters: `wandb login`, WANDB_BASE_URL; `swanlab login`, SWANLAB_API_HOST.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from longspec.cluster.stages import folders, read_lease
from longspec.train.tracking import FOLDER, INSTALL

# By tracker, where below its own folder the files lie that count; beside each stands a mark once it is uploaded.
FILES = {"wandb": "offline-run-*/*.wandb", "swanlab": "run-*/*.swanlab"}
QUIET = {"WANDB_ERROR_REPORTING": "false"}  # wandb's reports about itself to its makers
SECONDS = 900.0  # for each folder at most


def mark_of(file: Path) -> Path:
    """The mark of a file that is uploaded, which wandb leaves by itself."""
    return file.with_name(f"{file.name}.synced")


def waiting(results: Path) -> Iterator[tuple[str, Path]]:
    """Each tracker's files below results that are not uploaded, those of running jobs left out."""
    for stage in sorted(folders(results, FOLDER)):
        lease = read_lease(stage)
        if lease is not None and lease.is_alive:
            continue
        for name, pattern in FILES.items():
            files = sorted((stage / FOLDER / name).glob(pattern))
            yield from ((name, file) for file in files if not mark_of(file).exists())


def upload(name: str, file: Path) -> None:
    """Upload the folder of a tracker's file and leave the mark of it. Raises ValueError with the tracker's last words."""
    command = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if command is None:
        raise ValueError(f"there is no command {name}: {INSTALL}")
    # swanlab sync makes up a new experiment each time unless it is given the run's id.
    options = ["--id", file.parent.name.split("-", 2)[2]] if name == "swanlab" else []
    # Not a pipe: wandb's helper process would hold it open after wandb itself has been ended.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(  # without a terminal nobody is asked for a key
            [command, "sync", *options, str(file.parent)],
            env=QUIET | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=SECONDS,
        )
        output.seek(0)
        words = output.read().decode(errors="replace").strip()
    # An exit code of 0 proves no upload: wandb ends with 0 and without its mark, swanlab with 0 and these words.
    unsaid = name == "wandb" and not mark_of(file).exists()
    if done.returncode or unsaid or "Confirm sync finish failed" in words:
        raise ValueError(f"{(words or 'it said nothing').splitlines()[-1]} (exit code {done.returncode})")
    mark_of(file).touch()


def main(argv: list[str]) -> int:
    """Upload folder after folder; 1 when one of them could not be."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster sync", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder; default: %(default)s")
    results, code = parser.parse_args(argv).results, 0
    files = list(waiting(results))
    for name, file in files:
        print(f"{name} {file.parent}: ", end="", flush=True)
        try:
            upload(name, file)
            print("uploaded", flush=True)
        except (ValueError, OSError, subprocess.TimeoutExpired) as error:
            print(f"error: {error}", flush=True)
            code = 1
    if not files:
        print(f"nothing to upload below {results}, running jobs aside; runtime.tracker_mode: offline leaves such folders")
    return code
