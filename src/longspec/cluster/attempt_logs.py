"""One log for each attempt of a job, and the failing rank's own words as the last thing in it."""

import json
import re
from contextlib import suppress
from pathlib import Path

from longspec.slurm import own_job

LAST_LINE = re.compile(r"^(?:\d\d:\d\d:\d\d )?((?:error: |stopped at step ).*)", re.MULTILINE)  # of a rank that knows why


def attempts(log: Path) -> list[Path]:
    """Return the logs of all attempts of a job, which lie in a folder beside its log, under the same name."""
    return sorted(log.with_suffix("").glob("attempt-*.log"))


def time_of(path: Path) -> float:
    """Return when a file was written to, in seconds since 1970; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def begun(log: Path, since: float) -> int:
    """Count the attempts whose log was written to after `since`, in seconds since 1970."""
    return sum(time_of(path) >= since for path in attempts(log))


def new_log(log: Path) -> Path:
    """Begin the log of a new attempt, of which `log` becomes a link; those of earlier attempts stay."""
    folder = log.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem.split("-")[1]) for path in attempts(log)), default=0)
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
    """Return why an attempt failed: the first rank's error.json, or the first error in the log.

    `errors` is torchrun's folder, in which each rank of each machine that raises leaves error.json.
    """
    # The first by the file system's clock: those of two machines may differ.
    for path in sorted(errors.rglob("error.json"), key=time_of):
        with suppress(ValueError, KeyError, TypeError):  # torn by the end of its machine
            return str(json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]).rstrip()
    return next((line[1] for line in LAST_LINE.finditer(text)), "")
