# Which jobs have ended and which are tried again, where Snakemake (9.27) or its Slurm executor (2.8.0) would get it wrong.

import time
from pathlib import Path

import snakemake_executor_plugin_slurm
from snakemake.jobs import Job
from snakemake.logging import logger

from longspec.cluster.retry_policy import begun, fruitful_tries, reason_to_give_up
from longspec.evaluate.journal import unfinished

BEGAN = time.time()
OTHER_ENDS = {"PREEMPTED", "NODE_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
TRIES_OF_OTHERS = 2  # after the first, of jobs that do not go on where they were
PAUSE = 30  # seconds after a stage's job that has not begun, or any other that failed: Slurm may be away
seen = set()
measured = {}  # by evaluation, what its failed tries left measured

asked_slurm = snakemake_executor_plugin_slurm.query_job_status
asked_age = snakemake_executor_plugin_slurm.get_min_job_age
restarts_of_rule = Job.restart_times.fget


async def ask_slurm(command, logger):
    """Slurm's states of the jobs, in words the executor knows. It waits for ever for a job that is preempted (unless Slurm
    runs it again, which it must not: slurm-no-requeue), that ends in a way it has no word for, or that Slurm has forgotten
    between two questions; and for the rest of its life it keeps jobs from all nodes of one that lost one (NODE_FAIL).
    """
    states, seconds = await asked_slurm(command, logger)
    if states is not None:
        states = {job: state.split(" ")[0] for job, state in states.items()}
        states = {
            job: "FAILED" if state in OTHER_ENDS else state
            for job, state in states.items()
        }
        # An array's tasks that have not begun are one line, 12_[3-64]; for 12_5 the executor looks for 12, too.
        states = {
            job.split("_[")[0]: state for job, state in states.items() if "_[" in job
        } | states
        seen.update(states)
        # Taken for a success whose files are then looked for.
        states = dict.fromkeys(seen - states.keys(), "UNKNOWN") | states
    return states, seconds


known_age = []


def min_job_age():
    """How long squeue shows a job that has ended; while Slurm does not answer, what it said before. The executor would turn
    to sacct then, and without accounting ask it for an hour after Slurm is back, and wait for ever.
    """
    known_age[:] = [age for age in (asked_age(), *known_age) if age is not None][:1]
    return known_age[0] if known_age else None


def fruitful(job):
    """Tries of an evaluation that are not counted, since they have measured something."""
    if job.rule.name != "evaluate":
        return 0
    evaluated = Path(job.output[0])
    return fruitful_tries(
        measured.setdefault(evaluated, {}), job.attempt, unfinished(evaluated)
    )


def restarts(job):
    """None for a stage without hope: its reason is told now, and not after fifty more jobs."""
    allowed = restarts_of_rule(job)
    if not allowed:
        return 0
    if job.rule.name != "train":
        if job.attempt <= TRIES_OF_OTHERS:
            time.sleep(PAUSE)
        return min(allowed, TRIES_OF_OTHERS + fruitful(job))
    stage, log = Path(job.output[0]).parent, Path(job.log[0])
    reason = reason_to_give_up(stage, log, BEGAN, job.attempt)
    if reason:
        logger.error(f"{stage} is not tried again: {reason}")
    elif begun(log, BEGAN) < job.attempt:
        time.sleep(PAUSE)
    return 0 if reason else allowed


snakemake_executor_plugin_slurm.query_job_status = ask_slurm
snakemake_executor_plugin_slurm.get_min_job_age = min_job_age
Job.restart_times = property(restarts)
