# Which jobs have ended and which are tried again, where Snakemake (9.27) or its Slurm executor (2.8.0) would get it wrong.

import time
from pathlib import Path

import snakemake_executor_plugin_slurm
from snakemake.jobs import Job

from longspec.artefact import read_json

STATUS_FILE = "status.json"  # which a train job leaves beside its outputs
BEGAN = time.time()

asked_slurm = snakemake_executor_plugin_slurm.query_job_status
asked_age = snakemake_executor_plugin_slurm.get_min_job_age
restarts_of_rule = Job.restart_times.fget


async def ask_slurm(command, logger):
    """Slurm's states, a preempted job's as a cancelled one's: the executor leaves it to Slurm to run such a job again, and
    where Slurm must not (slurm-no-requeue) waits for ever."""
    states, seconds = await asked_slurm(command, logger)
    if states is not None:
        states = {
            job: "CANCELLED" if state == "PREEMPTED" else state
            for job, state in states.items()
        }
    return states, seconds


known_age = []


def min_job_age():
    """How long squeue shows a job that has ended; while Slurm does not answer, what it said before. The executor would turn
    to sacct then, and without accounting ask it for an hour after Slurm is back, and wait for ever.
    """
    known_age[:] = [age for age in (asked_age(), *known_age) if age is not None][:1]
    return known_age[0] if known_age else None


def is_hopeless(job):
    """Whether a stage said, since this Snakemake began, that it would fail in the same way again."""
    if job.rule.name != "train":
        return False
    path = Path(job.output[0]).parent / STATUS_FILE
    try:
        told = path.stat().st_mtime >= BEGAN
        status = read_json(path)
    except (OSError, ValueError):
        return False
    return told and status["state"] == "failed" and status["deterministic"]


def restarts(job):
    """None for a stage that has no hope: its reason is told now, and not after fifty more jobs."""
    return 0 if is_hopeless(job) else restarts_of_rule(job)


snakemake_executor_plugin_slurm.query_job_status = ask_slurm
snakemake_executor_plugin_slurm.get_min_job_age = min_job_age
Job.restart_times = property(restarts)
