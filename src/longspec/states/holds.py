"""Stored states are removed when no stage needs them any more. No torch: Snakemake holds them, before its first job.

    FOLDER/needed/{run}_{variant}_{stage}     an empty file for each stage that is still to be trained on them

A file stays until its stage is done, whichever call of Snakemake that is: what an interrupted stage needs is not removed by
another run's end. Two stages may end at once: whoever finds no file left renames the folder first, which only one can.

A trained stage that is planned to be trained again has its states.json set aside, so that Snakemake makes it, and the states,
first. If the change is taken back before that training, the file is put back.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspec.atomic_files import fsync_path

NEEDED = "needed"
REMOVED = ".removed"  # a folder's last name
COPY = "states.json"  # in a stage's folder: the contents.json of the states that it is trained on
ASIDE = f".{COPY}"


def hold(folder: Path, reader: str) -> None:
    """Keep a folder of stored states, which may be still to be built, until this stage releases it."""
    (folder / NEEDED).mkdir(parents=True, exist_ok=True)
    (folder / NEEDED / reader).touch()


def needed_by(folder: Path) -> list[str]:
    """The stages that a folder is kept for."""
    return sorted(path.name for path in (folder / NEEDED).glob("*"))


def set_aside(stage: Path) -> None:
    """Hide the states.json of a stage's folder from Snakemake."""
    if (stage / COPY).is_file():
        (stage / COPY).replace(stage / ASIDE)


def put_back(stage: Path) -> None:
    """Put the states.json that was set aside back, unless it was made anew."""
    if (stage / COPY).is_file():
        (stage / ASIDE).unlink(missing_ok=True)
    elif (stage / ASIDE).is_file():
        (stage / ASIDE).rename(stage / COPY)


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
