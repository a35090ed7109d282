"""One log for each attempt of a job; it ends with the failing rank's own words."""

import re
from pathlib import Path

from longspec.slurm import own_job

# From a rank that knows why, or the end of a traceback.
LAST_LINE = re.compile(r"^(?:\d\d:\d\d:\d\d )?((?:error: |stopped at step |[\w.]+Error: ).*)", re.MULTILINE)


def attempts(log: Path) -> list[Path]:
    """Return the logs of all attempts of a job. They lie beside its log, in a folder of the same name."""
    return sorted(log.with_suffix("").glob("attempt-*.log"))


def time_of(path: Path) -> float:
    """Return when a file was last written to, in seconds since 1970; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def begun(log: Path, since: float) -> int:
    """Count the attempts whose log was written to after `since`, in seconds since 1970."""
    return sum(time_of(path) >= since for path in attempts(log))


def new_log(log: Path) -> Path:
    """Begin the log of a new attempt, and make `log` a link to it; the logs of earlier attempts stay."""
    folder = log.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem.split("-")[1]) for path in attempts(log)), default=0)
    job = own_job()
    path = folder / f"attempt-{number:03d}{f'-job-{job}' if job else ''}.log"
    path.touch()
    # Snakemake removes a job's log before it starts the job: that is only the link, never an attempt's log.
    link = log.with_name(f".{log.name}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(path.relative_to(log.parent))
    link.replace(log)
    return path


def last_words(text: str) -> str:
    """Return the first error in an attempt's log, or the line that it was stopped; "" if there is neither."""
    return next((line[1] for line in LAST_LINE.finditer(text)), "")
