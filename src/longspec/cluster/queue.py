"""This user's jobs in Slurm's queue."""

import os
from dataclasses import dataclass
from pathlib import Path

from longspec.slurm import NoAnswerError, squeue

# Comments, names and folders may hold spaces, tabs, | and even line ends; these two characters stand in none of them.
RECORD, FIELD = "\x1e", "\x1f"
# A CLUSTER: line of --clusters may follow a record: the last field must be one that holds no line end itself.
FORMAT = RECORD + FIELD.join(("%i", "%T", "%j", "%k", "%Z", "%r", "%M", "%l"))


@dataclass(frozen=True)
class QueuedJob:
    """One job, as squeue shows it."""

    id: str
    state: str  # in full: PENDING, RUNNING, COMPLETING
    name: str  # the executor's run id, the same for all jobs of one snakemake
    comment: str  # rule_train_wildcards_demo_sinkpi-slicing_base
    workdir: str
    reason: str  # why it waits
    elapsed: str
    limit: str

    def is_of(self, folder: Path) -> bool:
        """Tell whether the job was sent from a folder."""
        return bool(self.workdir) and Path(self.workdir).resolve() == folder.resolve()


def my_jobs() -> list[QueuedJob]:
    """Return all of this user's jobs that wait, run or are completing.

    Raises NoAnswerError when there is no squeue or it gives no answer.
    """
    printed = squeue(f"--user={os.getuid()}", "--format", FORMAT)
    return [_parse(record) for record in printed.split(RECORD)[1:]]


def _parse(record: str) -> QueuedJob:
    fields = record.split(FIELD)
    if len(fields) != FORMAT.count(FIELD) + 1:
        raise NoAnswerError(f"squeue gave an answer that cannot be read: {record!r}")
    fields[-1] = fields[-1].partition("\n")[0]
    return QueuedJob(*("" if text == "(null)" else text for text in fields))
