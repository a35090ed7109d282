"""Stored states are removed when no stage needs them any more. No torch: Snakemake holds them, before its first job.

    FOLDER/needed/{run}_{variant}_{stage}     an empty file for each stage that is still to be trained on them

A file stays until its stage is done, whichever call of Snakemake that is: what an interrupted stage needs is not removed by
another run's end. Two stages may end at once: whoever finds no file left renames the folder first, which only one can.

A trained stage that is planned to be trained again has its states.json set aside, so that Snakemake makes it, and the states,
first. Where it is not trained again in the end, since the change was taken back, the file is.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspec.atomic_files import fsync_path

NEEDED = "needed"
REMOVED = ".removed"  # a folder's last name
ASIDE = ".states.json"


def hold(folder: Path, reader: str) -> None:
    """Keep a folder of stored states, which may be still to be built, until this stage releases it."""
    (folder / NEEDED).mkdir(parents=True, exist_ok=True)
    (folder / NEEDED / reader).touch()


def needed_by(folder: Path) -> list[str]:
    """The stages that a folder is kept for."""
    return sorted(path.name for path in (folder / NEEDED).glob("*"))


def set_aside(states: Path) -> None:
    """Hide a stage's states.json from Snakemake."""
    if states.is_file():
        states.replace(states.with_name(ASIDE))


def take_back(states: Path) -> None:
    """Undo that, unless the file was made anew."""
    aside = states.with_name(ASIDE)
    if states.is_file():
        aside.unlink(missing_ok=True)
    elif aside.is_file():
        aside.rename(states)


def release(folder: Path, reader: str) -> dict[str, Any]:
    """This stage is trained: remove the folder when no other one needs it. Returns a note of what became of it."""
    (folder / NEEDED / reader).unlink(missing_ok=True)
    readers, last = needed_by(folder), folder.with_name(f"{folder.name}{REMOVED}-{os.getpid()}")
    if not readers:
        with suppress(FileNotFoundError):  # there is none, or another one has it
            folder.rename(last)
            fsync_path(folder.parent)
    # Also what a killed one left.
    for path in folder.parent.glob(f"{folder.name}{REMOVED}-*"):
        shutil.rmtree(path, ignore_errors=True)
    return {"states": str(folder), "still_needed_by": readers}
