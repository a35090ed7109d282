"""The end of the Slurm job that this process runs in."""

import os
import subprocess
import time
from datetime import datetime

# A scheduler that is restarted is away for some seconds.
TRIES, PAUSE = 4, 5.0


def slurm_deadline(pause: float = PAUSE) -> tuple[float | None, str]:
    """When this process's Slurm job ends, in seconds since 1970, and what to write into the log about it.

    None outside of a Slurm job, in one without a time limit, and when squeue gives no answer: then the job trains until
    Slurm ends it, and loses what it did after its last checkpoint.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None, ""
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    environment = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    answer = ""
    for attempt in range(TRIES):
        time.sleep(pause if attempt else 0)
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            answer = str(error)
            continue
        answer = done.stdout.strip() or done.stderr.strip() or "nothing"
        if done.returncode == 0 and answer in ("N/A", "NONE", "Unknown", "UNLIMITED"):
            return None, f"Slurm job {job} has no time limit"
        try:
            end = datetime.fromisoformat(answer)  # in this machine's time zone
        except ValueError:
            continue
        return end.timestamp(), f"Slurm job {job} ends at {end:%H:%M:%S on %d %B}; the stage saves and stops before"
    return None, f"the end of Slurm job {job} is unknown, so it is not stopped before: {' '.join(command)}: {answer}"
