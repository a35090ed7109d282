"""After the controlling Snakemake was killed: wait for its Slurm jobs or cancel them, unlock the folder, go on.

Slurm's jobs outlive the Snakemake that sent them, and no other takes them over: a second one that starts at once would send
jobs for the same files. Run it in the workflow's folder. Snakemake gets the arguments behind --, or those of the Snakemake
that was started last here.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from shlex import join
from typing import Any

from longspec.atomic_files import is_alive, read_json, write_json
from longspec.lease import BOOT_ID
from longspec.slurm import NoAnswerError, QueuedJob, my_jobs

NOTE = Path(".snakemake/controller.json")  # the process and machine that control the folder's jobs, or did so last
GO_ON = ["--profile", "slurm", "final_draft"]  # if no Snakemake has noted its arguments
SNAKEMAKE = [sys.executable, "-m", "snakemake"]  # works without its environment activated
TOLD_EVERY = 60.0  # seconds
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


def _began(pid: int) -> str:
    """Return when a process began, as this machine's boot id and clock ticks since boot; "" if it has ended."""
    with suppress(OSError):
        # Fields behind the command's name in brackets, which may hold anything (man proc).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] != "Z":  # not a zombie, which has ended; in a container perhaps nobody ever asks how
            return f"{BOOT_ID.read_text().strip()} {fields[19]}"
    return ""


def note_controller(folder: Path, *, slurm: bool) -> None:
    """Note that this Snakemake process controls the folder's jobs from now on. slurm: whether Slurm runs them."""
    note = {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}
    write_json(folder / NOTE, note | {"slurm": slurm, "arguments": sys.argv[1:]})


def last_note(folder: Path) -> dict[str, Any]:
    """Return the note of the Snakemake that was started last here; without one, assume Slurm and GO_ON."""
    found = read_json(folder / NOTE) if (folder / NOTE).exists() else {}
    return {"slurm": True, "arguments": GO_ON} | found


def living_controller(folder: Path, note: dict[str, Any]) -> str:
    """Return which process may still control the folder's jobs, and what to do about it; "" if there is none."""
    if "pid" not in note:
        return ""
    host, pid = note["host"], note["pid"]
    if host != socket.gethostname():
        return f"Snakemake was started here on {host} as process {pid}: look there (ssh {host} ps -p {pid}) whether it is gone"
    # Without /proc (macOS) both are empty, and a process of that number may be another one.
    if _began(pid) == note["began"] and (note["began"] or is_alive(pid)):
        return f"Snakemake is still at work in {folder} (process {pid}): let it work, or end it"
    return ""


def workflow_jobs(folder: Path) -> list[QueuedJob]:
    """Return the jobs that a Snakemake sent from the folder; other jobs that the user runs there are not ours.

    The executor names a job by the id of its run.
    """
    sent = [job for job in my_jobs() if job.workdir and RUN_ID.search(job.name)]
    return [job for job in sent if Path(job.workdir).resolve() == folder.resolve()]


def wait_for_jobs(folder: Path, poll: float, *, cancel: bool) -> None:
    """Return once no job of the folder is left. Raises NoAnswerError if Slurm cannot be asked at first."""
    jobs, told_at = workflow_jobs(folder), 0.0
    if jobs and cancel:
        subprocess.run(["scancel", *(job.id for job in jobs)], check=True)
    elif jobs:
        print("these jobs go on by themselves; to cancel them: Ctrl-C, then make resume CANCEL=1 (--cancel)", flush=True)
    while jobs:
        if time.monotonic() - told_at > TOLD_EVERY:
            shown = (f"{job.id} {job.comment.removeprefix('rule_')} {job.state.lower()} {job.elapsed}" for job in jobs)
            print(f"{time.strftime('%H:%M:%S')} {'cancelled' if cancel else 'waiting for'} {'; '.join(shown)}", flush=True)
            told_at = time.monotonic()
        time.sleep(poll)
        with suppress(NoAnswerError):  # a scheduler may be away for a while
            jobs = workflow_jobs(folder)


def main(argv: list[str]) -> int:  # noqa: RET503 (execv does not return)
    """Wait, unlock, and become Snakemake; return 1 if another one is at work here, or if a step fails."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster resume", description=__doc__.split("\n")[0])
    parser.add_argument("--cancel", action="store_true", help="cancel the jobs; a stage that trains saves its step first")
    parser.add_argument(
        "--gone", action="store_true", help="the Snakemake that was started on another machine is gone for sure"
    )
    parser.add_argument("--poll", type=float, default=10.0, help="seconds between two questions to Slurm")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="-- for snakemake; default: those of the one that was started last"
    )
    options = parser.parse_args(argv)
    folder = Path.cwd()
    try:
        if not (folder / "Snakefile").is_file():
            raise ValueError(f"{folder} holds no Snakefile; go to the workflow's folder first")
        note = last_note(folder)
        arguments = [word for word in options.arguments if word != "--"] or note["arguments"]
        living = "" if options.gone else living_controller(folder, note)
        if living:
            raise ValueError(f"{living}; when it is gone for sure: the same command with --gone (make resume GONE=1)")
        try:
            wait_for_jobs(folder, options.poll, cancel=options.cancel)
        except NoAnswerError:
            if note["slurm"]:  # without it there may be no Slurm here; with it, an earlier Snakemake may have sent jobs
                raise
        # Not sooner: without Slurm's answer a job may still write here.
        subprocess.run([*SNAKEMAKE, "--unlock", *arguments], check=True)  # of the run that the arguments choose
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"going on: snakemake {join(arguments)}", flush=True)
    os.execv(sys.executable, [*SNAKEMAKE, *arguments])
