# Faults of Snakemake (9.27) and its Slurm executor (2.8.0) by which work would be lost or a call would never end. Six of their
# functions are replaced. tests/workflow/test_upstream.py shows each fault, and fails once it is mended upstream: then the
# function here goes.

import time
from pathlib import Path

import snakemake_executor_plugin_slurm
from snakemake.jobs import Job
from snakemake.persistence import PersistenceBase

from longspec.workflow.jobs.retries import known_states, retries

# https://github.com/snakemake/snakemake/issues/3808 and 1978: Snakemake removes a job's outputs before it begins, records a
# failed job like one that ended well, and misses no intermediate file. What an earlier call had made of these outputs is still
# there, so the next call would end well with what is old. Here a job is marked before its outputs go and until it has ended
# well, and a marked one runs again (rerun-incomplete in profiles/default), also where nothing of it is there.
removed_before = Job.remove_existing_output
removed_after = Job.cleanup


async def mark_and_remove(job):
    """Remove what an earlier call has made of a job's outputs."""
    job.dag.workflow.persistence.started(job)
    await removed_before(job)


async def remove_and_mark(job, skip_outputs):
    """Remove what a failed job has made of its outputs."""
    await removed_after(job, skip_outputs)
    job.dag.workflow.persistence.started(job)


async def unfinished(persistence, job):
    """Return the outputs of a job that has begun and not ended well."""
    keys = {persistence._get_key(file): file for file in job.output}
    return [keys[key] for key in persistence._filter_incomplete_keys(keys)]


Job.remove_existing_output = mark_and_remove
Job.cleanup = remove_and_mark
PersistenceBase.incomplete = unfinished

# https://github.com/snakemake/snakemake/issues/2441: a rule cannot say which failure is worth another try. A stage that would
# fail in the same way again would be sent fifty times.
BEGAN = time.time()
restarts_of_rule = Job.restart_times.fget


def restarts(job):
    """Return how often a failed job is tried again; log why a stage is not."""
    allowed, path = restarts_of_rule(job), Path(job.output[0] if job.output else "")
    if not allowed:
        return 0
    log = Path(job.log[0] if job.log else "")
    tries, pause, reason = retries(job.rule.name, allowed, job.attempt, path, log, BEGAN)
    if reason:
        logger.error(f"{path.parent} is not tried again: {reason}")
    time.sleep(pause)
    return tries


Job.restart_times = property(restarts)

# https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/109 (a preempted job is left to Slurm, also where Slurm
# must not requeue it) and 485 (all nodes of a job that lost one are avoided from then on). Not reported: the executor waits for
# ever for a job whose end it has no word for, and for one that Slurm has forgotten.
asked_slurm = snakemake_executor_plugin_slurm.query_job_status
SEEN = {}


async def ask_slurm(command, logger):
    """Return Slurm's states of the jobs in words that the executor knows."""
    states, seconds = await asked_slurm(command, logger)
    return (states if states is None else known_states(states, SEEN)), seconds


snakemake_executor_plugin_slurm.query_job_status = ask_slurm

# Not reported: while Slurm does not answer, the executor turns from squeue to sacct, and without accounting asks it for an hour
# after Slurm is back, and waits for ever.
asked_age = snakemake_executor_plugin_slurm.get_min_job_age
known_age = []


def min_job_age():
    """Return how long squeue shows a job that has ended; while Slurm does not answer, what it said before."""
    known_age[:] = [age for age in (asked_age(), *known_age) if age is not None][:1]
    return known_age[0] if known_age else None


snakemake_executor_plugin_slurm.get_min_job_age = min_job_age
