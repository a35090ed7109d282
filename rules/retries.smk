# Which jobs have ended and which are tried again, where Snakemake (9.27) or its Slurm executor (2.8.0) would get it wrong:
# three of their functions are replaced, and longspec.workflow.jobs.retries decides.

import time
from pathlib import Path

import snakemake_executor_plugin_slurm
from snakemake.jobs import Job

from longspec.workflow.jobs.retries import KnownStates, RetryPolicy

known_states = KnownStates()
policy = RetryPolicy(time.time())

asked_slurm = snakemake_executor_plugin_slurm.query_job_status
asked_age = snakemake_executor_plugin_slurm.get_min_job_age
restarts_of_rule = Job.restart_times.fget


async def ask_slurm(command, logger):
    """Slurm's states of the jobs, in words the executor knows."""
    states, seconds = await asked_slurm(command, logger)
    return (states if states is None else known_states.translate(states)), seconds


known_age = []


def min_job_age():
    """How long squeue shows a job that has ended; while Slurm does not answer, what it said before. The executor would turn
    to sacct then, and without accounting ask it for an hour after Slurm is back, and wait for ever.
    """
    known_age[:] = [age for age in (asked_age(), *known_age) if age is not None][:1]
    return known_age[0] if known_age else None


def restarts(job):
    """How often a failed job is tried again. A stage without hope is not, and its reason is told."""
    allowed, path = restarts_of_rule(job), Path(job.output[0] if job.output else "")
    if not allowed:
        return 0
    if job.rule.name == "train":
        retries = policy.stage(allowed, job.attempt, path.parent, Path(job.log[0]))
    else:
        retries = policy.other(job.rule.name, allowed, job.attempt, path)
    if retries.reason:
        logger.error(f"{path.parent} is not tried again: {retries.reason}")
    time.sleep(retries.pause)
    return retries.allowed


snakemake_executor_plugin_slurm.query_job_status = ask_slurm
snakemake_executor_plugin_slurm.get_min_job_age = min_job_age
Job.restart_times = property(restarts)
