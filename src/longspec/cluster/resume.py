"""After the controlling Snakemake was killed: wait for its Slurm jobs or cancel them, unlock the folder, go on.

Slurm's jobs outlive the Snakemake that has sent them, and none takes them over: a second one that starts at once would
send jobs for the same files. Run it in the workflow's folder; what follows -- is given to snakemake.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from longspec.cluster.controller import living_controller
from longspec.cluster.queued_jobs import QueuedJob, jobs_of_folder
from longspec.slurm import NoAnswerError

GO_ON = ["--profile", "slurm", "final_draft"]
SNAKEMAKE = [sys.executable, "-m", "snakemake"]
TOLD_EVERY = 60.0  # seconds
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


def shown(jobs: list[QueuedJob]) -> str:
    """The jobs in words."""
    return "; ".join(f"{job.id} {job.comment.removeprefix('rule_')} {job.state.lower()} {job.elapsed}" for job in jobs)


def workflow_jobs(folder: Path) -> list[QueuedJob]:
    """The jobs that a Snakemake sent from the folder; others that the user runs there are not ours.

    The executor names them by a number of its run, and the rule in the comment, which some clusters overwrite.
    """
    return [job for job in jobs_of_folder(folder) if job.comment.startswith(("rule_", "group_")) or RUN_ID.search(job.name)]


def wait_for_jobs(folder: Path, poll: float, *, cancel: bool) -> None:
    """Return once no job of the folder is left. Raises NoAnswerError when Slurm cannot be asked at first."""
    jobs, told_at = workflow_jobs(folder), 0.0
    if jobs and cancel:
        print(f"cancelling {shown(jobs)}", flush=True)
        subprocess.run(["scancel", *(job.id for job in jobs)], check=True)
    elif jobs:
        print(
            "these jobs go on by themselves; to cancel them: Ctrl-C, then the same with --cancel (make resume CANCEL=1)",
            flush=True,
        )
    while jobs:
        if time.monotonic() - told_at > TOLD_EVERY:
            print(f"{time.strftime('%H:%M:%S')} waiting for {shown(jobs)}", flush=True)
            told_at = time.monotonic()
        time.sleep(poll)
        with suppress(NoAnswerError):  # a scheduler that is away for a while
            jobs = workflow_jobs(folder)


def main(argv: list[str]) -> int:  # noqa: RET503 (execv does not return)
    """Wait, unlock, and become Snakemake; 1 when another one is at work here."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster resume", description=__doc__.split("\n")[0])
    parser.add_argument("--cancel", action="store_true", help="cancel the jobs; a stage that trains saves its step first")
    parser.add_argument(
        "--gone", action="store_true", help="the Snakemake that was started on another machine is gone for sure"
    )
    parser.add_argument("--poll", type=float, default=10.0, help="seconds between two questions to Slurm")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"-- for snakemake; default: {' '.join(GO_ON)}")
    options = parser.parse_args(argv)
    folder = Path.cwd()
    arguments = [word for word in options.arguments if word != "--"] or GO_ON
    if not (folder / "Snakefile").is_file():
        print(f"error: {folder} holds no Snakefile; go to the workflow's folder first", file=sys.stderr)
        return 1
    living = "" if options.gone else living_controller(folder)
    if living:
        print(f"error: {living}; when it is gone for sure: the same command with --gone (make resume GONE=1)", file=sys.stderr)
        return 1
    try:
        wait_for_jobs(folder, options.poll, cancel=options.cancel)
    except (NoAnswerError, subprocess.CalledProcessError) as error:
        print(f"error: {error}; without Slurm's answer it is not sure that no job writes here", file=sys.stderr)
        return 1
    unlocked = subprocess.run([*SNAKEMAKE, "--unlock"], capture_output=True, text=True)
    if unlocked.returncode:
        print(unlocked.stdout + unlocked.stderr, file=sys.stderr)
        return 1
    print(f"going on: snakemake {' '.join(arguments)}", flush=True)
    os.execv(sys.executable, [*SNAKEMAKE, *arguments])
