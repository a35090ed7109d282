"""Ask Slurm's squeue, for the trainer, the launcher and the table of stages; no other module does. No torch."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

SECONDS = 30.0  # to wait for an answer of Slurm
T = TypeVar("T")
TRIES, PAUSE = 4, 5.0  # a restarted scheduler is away for some seconds
# Comments, names and folders may hold spaces, tabs, | and even line ends, but never these two characters.
RECORD, FIELD = "\x1e", "\x1f"
# With --clusters, a line "CLUSTER: ..." may follow a record: the last field must be one that never holds a line end.
FORMAT = RECORD + FIELD.join(("%i", "%T", "%j", "%k", "%Z", "%r", "%M", "%l"))


class NoAnswerError(ValueError):
    """Say that Slurm could not be asked: nothing is known about its jobs, which does not mean that there are none."""


@dataclass(frozen=True)
class QueuedJob:
    """Hold one job as squeue shows it."""

    id: str
    state: str  # in full: PENDING, RUNNING, COMPLETING
    name: str  # the executor's run id, the same for all jobs of one snakemake
    comment: str  # rule_train_wildcards_demo_sinkpi-slicing_base
    workdir: str
    reason: str  # why it waits
    elapsed: str
    limit: str


def answer_of(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return all that a Slurm command prints. Raises NoAnswerError when there is no such command or it gives no answer."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except FileNotFoundError:
        raise NoAnswerError(f"{command[0]} is not on the PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(f"{command[0]} gave no answer: {error}") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoAnswerError(f"{command[0]} gave no answer: {words[-1]}")
    return done.stdout


def own_job() -> str | None:
    """Return the Slurm job that this process runs in; None outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID")


def squeue(*options: str) -> str:
    """Return what squeue prints with these options and no header, times as 2031-05-06T07:08:09. Raises NoAnswerError."""
    # SQUEUE_STATES, SQUEUE_PARTITION and the like suit a user's tables; here they would hide jobs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return answer_of(["squeue", "--noheader", *options], environment | {"SLURM_TIME_FORMAT": "standard"})


def my_jobs() -> list[QueuedJob]:
    """Return all of this user's jobs that wait, run or are completing. Raises NoAnswerError."""
    jobs = []
    for record in squeue(f"--user={os.getuid()}", "--format", FORMAT).split(RECORD)[1:]:
        fields = record.split(FIELD)
        if len(fields) != FORMAT.count(FIELD) + 1:
            raise NoAnswerError(f"squeue gave an answer that cannot be read: {record!r}")
        fields[-1] = fields[-1].partition("\n")[0]
        jobs.append(QueuedJob(*("" if text == "(null)" else text for text in fields)))
    return jobs


def ask_patiently(ask: Callable[[], T], pause: float = PAUSE) -> T:
    """Return the first answer of TRIES tries, `pause` seconds apart. Raises the last try's ValueError."""
    for _ in range(TRIES - 1):
        try:
            return ask()
        except ValueError:
            time.sleep(pause)
    return ask()
