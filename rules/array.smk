# Slurm job arrays. The executor (2.8.0) has two faults there, both seen by running it; without an array nothing here
# does anything.
# 1. The process of every task begins with the first task's job: it deletes that job's outputs and at its end waits for
#    them. So a task turns at once into the command for its own job, which the executor has sent along.
# 2. Of an array's jobs those that Snakemake does not hand over at once are forgotten, and it waits for them for ever.

import base64
import json
import os
import re
import sys
import zlib

COMMANDS = "--slurm-jobstep-array-execs"


def become_own_task(arguments, environment):
    """In a task of an array but its first: replace this process by the command for the task's own job."""
    task = environment.get("SLURM_ARRAY_TASK_ID")
    if COMMANDS in arguments and task != environment.get("SLURM_ARRAY_TASK_MIN"):
        sent = arguments[arguments.index(COMMANDS) + 1]
        command = json.loads(base64.b64decode(sent))[task]
        shell = zlib.decompress(bytes.fromhex(command)).decode()
        os.execvp("bash", ["bash", "-c", shell])


def check_arrays(setting, planned, jobs, jobs_per_timespan):
    """Refuse what would make Snakemake hand over less than all jobs of an array at once. `planned`: a rule's name a job."""
    names = set(re.split(r"[,;\s]+", setting or ""))
    arrays = set(planned) if "all" in names else names & set(planned)
    if arrays and len(planned) > min(jobs, jobs_per_timespan):
        raise ValueError(
            f"{len(planned)} jobs are planned, but --jobs is {jobs} and --max-jobs-per-timespan {jobs_per_timespan}/...: the"
            f" Slurm executor would lose jobs of its arrays ({', '.join(sorted(arrays))}) and wait for ever; raise both to"
            f" {len(planned)}, or submit each job by itself: --slurm-array-jobs none"
        )


become_own_task(sys.argv, os.environ)
