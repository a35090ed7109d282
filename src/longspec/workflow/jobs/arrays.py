"""Slurm job arrays: which command a task of one is to run, and when an array would lose jobs."""

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence

COMMANDS = "--slurm-jobstep-array-execs"  # has the command of each task but the first


def own_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The shell command of this task's own job; None in the first task of an array and outside of arrays.

    The executor writes the option with "=" where it wraps the command, and as two words where it sends a script.
    """
    task = environment.get("SLURM_ARRAY_TASK_ID")
    words = [word for argument in arguments for word in (argument.split("=", 1) if argument.startswith("--") else [argument])]
    if COMMANDS not in words or task == environment.get("SLURM_ARRAY_TASK_MIN"):
        return None
    commands = json.loads(base64.b64decode(words[words.index(COMMANDS) + 1]))
    return zlib.decompress(bytes.fromhex(commands[task])).decode()


def check_arrays(setting: str | None, planned: Sequence[str], jobs: int, jobs_per_timespan: int) -> None:
    """Raise ValueError for what would make Snakemake hand over less than all jobs of an array at once.

    setting: the rules whose jobs are arrays, as --slurm-array-jobs has them; planned: the name of each planned job's rule.
    """
    names = set(re.split(r"[,;\s]+", setting or ""))
    arrays = set(planned) if "all" in names else names & set(planned)
    if arrays and len(planned) > min(jobs, jobs_per_timespan):
        raise ValueError(
            f"{len(planned)} jobs are planned, but --jobs is {jobs} and --max-jobs-per-timespan {jobs_per_timespan}/...: the"
            f" Slurm executor would lose jobs of its arrays ({', '.join(sorted(arrays))}) and wait for ever; raise both to"
            f" {len(planned)}, or submit each job by itself: --slurm-array-jobs none"
        )
