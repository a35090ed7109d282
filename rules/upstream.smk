# Faults of Snakemake (9.27) and its Slurm executor (2.8.0) that lose work, or let a call never end. Six of their functions are
# replaced. tests/workflow/test_upstream.py shows each fault, and fails once it is fixed upstream: then the function here can
# go.

import time
from pathlib import Path

import snakemake_executor_plugin_slurm
from snakemake.jobs import Job
from snakemake.persistence import PersistenceBase

from longspec.workflow.jobs.retries import known_states, retries

# https://github.com/snakemake/snakemake/issues/3808 and 1978: Snakemake removes a job's outputs before it begins, records a
# failed job like one that ended well, and misses no intermediate file. Old outputs of an earlier call may still be there, so
# the next call would end well with them. Here a job is marked before its outputs go and until it has ended well. A marked job
# runs again (rerun-incomplete in profiles/default), even if none of its outputs is there.
removed_before = Job.remove_existing_output
removed_after = Job.cleanup


async def mark_and_remove(job):
    """Mark a job, and remove what an earlier call has made of its outputs."""
    job.dag.workflow.persistence.started(job)
    await removed_before(job)


async def remove_and_mark(job, skip_outputs):
    """Remove what a failed job has made of its outputs, and mark the job."""
    await removed_after(job, skip_outputs)
    job.dag.workflow.persistence.started(job)


async def unfinished(persistence, job):
    """Return the outputs of a job that has begun and has not ended well."""
    keys = {persistence._get_key(file): file for file in job.output}
    return [keys[key] for key in persistence._filter_incomplete_keys(keys)]


Job.remove_existing_output = mark_and_remove
Job.cleanup = remove_and_mark
PersistenceBase.incomplete = unfinished

# https://github.com/snakemake/snakemake/issues/2441: a rule cannot say which failure is worth another try. A stage that would
# fail in the same way again would be sent fifty times.
BEGAN, PROGRESS = time.time(), {}
restarts_of_rule = Job.restart_times.fget


def restarts(job):
    """Return how often a failed job is tried again; log why a stage is not tried again."""
    allowed, path = restarts_of_rule(job), Path(job.output[0] if job.output else "")
    if not allowed:
        return 0
    log = Path(job.log[0] if job.log else "")
    tries, pause, reason = retries(job.rule.name, allowed, job.attempt, path, log, BEGAN, PROGRESS)
    if reason:
        logger.error(f"{path.parent} is not tried again: {reason}")
    time.sleep(pause)
    return tries


Job.restart_times = property(restarts)

# https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/109 (a preempted job is left to Slurm, even if Slurm must
# not requeue it) and 485 (after a job lost one node, all its nodes are avoided). Not reported: the executor waits forever
# for a job that ends in a state it does not know, and for one that Slurm has forgotten.
asked_slurm = snakemake_executor_plugin_slurm.query_job_status
SEEN = {}


async def ask_slurm(command, logger):
    """Return Slurm's states of the jobs, in words that the executor knows."""
    states, seconds = await asked_slurm(command, logger)
    return (states if states is None else known_states(states, SEEN)), seconds


snakemake_executor_plugin_slurm.query_job_status = ask_slurm

# Not reported: while Slurm does not answer, the executor turns from squeue to sacct. Without accounting it goes on asking sacct
# for an hour after Slurm is back, and then waits forever.
asked_age = snakemake_executor_plugin_slurm.get_min_job_age
known_age = []


def min_job_age():
    """Return how long squeue shows an ended job; while Slurm does not answer, what it said before."""
    known_age[:] = [age for age in (asked_age(), *known_age) if age is not None][:1]
    return known_age[0] if known_age else None


snakemake_executor_plugin_slurm.get_min_job_age = min_job_age
