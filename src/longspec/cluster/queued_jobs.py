"""This user's jobs in Slurm's queue."""

import os
from dataclasses import dataclass
from pathlib import Path

from longspec.slurm import NoAnswerError, squeue

# Comments, names and folders may hold spaces, tabs, | and even line ends; these two characters stand in none of them.
RECORD, FIELD = "\x1e", "\x1f"
# A CLUSTER: line of --clusters may follow a record: the last field must be one that holds no line end itself.
FORMAT = RECORD + FIELD.join(("%i", "%A", "%T", "%j", "%k", "%Z", "%N", "%r", "%M", "%l"))
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
ENDED |= {"PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"}


@dataclass(frozen=True)
class QueuedJob:
    """One job, as squeue shows it."""

    id: str  # what scancel takes
    number: str  # what the job sees as SLURM_JOB_ID
    state: str  # in full: PENDING, RUNNING, COMPLETING
    name: str  # the executor's run id, the same for all jobs of one snakemake
    comment: str  # rule_train_wildcards_demo_sinkpi-slicing_base
    workdir: str
    nodes: str  # empty while it waits
    reason: str  # why it waits
    elapsed: str
    limit: str

    @property
    def has_ended(self) -> bool:
        """Whether Slurm remembers this job and runs it no more."""
        return self.state in ENDED


def my_jobs(*, with_ended: bool = False) -> list[QueuedJob]:
    """All of this user's jobs that wait, run or are completing; `with_ended` also those Slurm still remembers.

    Raises NoAnswerError when there is no squeue or it gives no answer.
    """
    printed = squeue(f"--user={os.getuid()}", "--format", FORMAT, *(["--states=all"] if with_ended else []))
    return [_parse(record) for record in printed.split(RECORD)[1:]]


def _parse(record: str) -> QueuedJob:
    fields = record.split(FIELD)
    if len(fields) != FORMAT.count(FIELD) + 1:
        raise NoAnswerError(f"squeue gave an answer that cannot be read: {record!r}")
    fields[-1] = fields[-1].partition("\n")[0]
    return QueuedJob(*("" if text == "(null)" else text for text in fields))


def jobs_of_folder(folder: Path) -> list[QueuedJob]:
    """This user's jobs that wait, run or are completing, and whose working directory is the folder."""
    return [job for job in my_jobs() if job.workdir and Path(job.workdir).resolve() == folder.resolve()]
