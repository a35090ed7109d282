"""One log for each attempt of a job, and the failing rank's own words as the last thing in it."""

import json
import re
from pathlib import Path
from typing import TextIO

from longspec.slurm import own_job

LAST_LINE = re.compile(r"^(?:\d\d:\d\d:\d\d )?((?:error: |stopped at step ).*)", re.MULTILINE)  # of a rank that knows why
SILENT = re.compile(r"^error: rank \d+ on \S+ \(pid \d+\) (?:was killed by|ended without) .*", re.MULTILINE)  # by torchrun.py


def folder_of(log: Path) -> Path:
    """Where the logs of all attempts of a job lie: beside its log, under the same name."""
    return log.with_suffix("")


def new_log(log: Path) -> Path:
    """The log of a new attempt, of which `log` becomes a link; those of earlier attempts stay."""
    folder = folder_of(log)
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem.split("-")[1]) for path in folder.glob("attempt-*.log")), default=0)
    job = own_job()
    path = folder / f"attempt-{number:03d}{f'-job-{job}' if job else ''}.log"
    path.touch()
    # Snakemake removes a job's log before it starts the job: only the link, and never the attempts.
    link = log.with_name(f".{log.name}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(path.relative_to(log.parent))
    link.replace(log)
    return path


def last_words(text: str, errors: Path) -> str:
    """Why an attempt failed: the words of the rank that failed first, and a line for each rank that left none.

    Those words are the first rank's error.json, or the first error in the log. `errors` is torchrun's folder, in which each
    rank of each machine that raises leaves error.json.
    """
    words = _first_error(errors) or next((line[1] for line in LAST_LINE.finditer(text)), "")
    silent = [line for line in SILENT.findall(text) if line != words]
    return "\n".join(filter(None, [words, *silent]))


def _first_error(errors: Path) -> str:
    # By the file system's clock: those of two machines may differ.
    for path in sorted(errors.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            return str(json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]).rstrip()
        except (ValueError, KeyError, TypeError):  # torn by the end of its machine
            continue
    return ""


def append_last_words(handle: TextIO, path: Path, errors: Path) -> None:
    """Put them at the end of a log, below what the launchers have to say."""
    words = last_words(path.read_text(errors="replace"), errors)
    if words:
        handle.write(f"\nThis attempt ended:\n{words}\n")
        handle.flush()
