"""One log for each attempt of a job, and the failing rank's own words as the last thing in it."""

import re
from pathlib import Path

from longspec.slurm import own_job

# Of a rank that knows why, or the end of a traceback.
LAST_LINE = re.compile(r"^(?:\d\d:\d\d:\d\d )?((?:error: |stopped at step |[\w.]+Error: ).*)", re.MULTILINE)


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


def last_words(text: str) -> str:
    """Return the first error in an attempt's log, or that it was stopped; empty where there is neither."""
    return next((line[1] for line in LAST_LINE.finditer(text)), "")
