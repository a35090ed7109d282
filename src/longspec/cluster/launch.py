"""Start a job's ranks by torchrun, here or on every node of the Slurm job, and keep a log of its own for each attempt.

    python -m longspec.cluster launch --nodes 2 --ranks 8 --log LOG -- longspec.train ARGUMENTS

In the batch step of a Slurm job, where Snakemake's executor puts what has the resource `mpi`, each node's torchrun is the task
of a job step, also on one node: Slurm tells a step's task to end before it kills it, but of a batch step only the shell.
"""

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TextIO

from longspec.cluster.attempt_logs import append_last_words, new_log
from longspec.distributed import die_with_parent
from longspec.shown import one_line
from longspec.slurm import NoAnswerError, answer_of, ask_patiently, own_job, squeue

# Ports below those that systems give away by themselves; two jobs that share a node have different numbers.
FIRST_PORT, PORTS = 20000, 10000
PATIENCE = 600  # seconds that torchrun gives its ranks after a SIGTERM to end their step and save; its own default is 30
OTHERS = 60  # seconds for the other nodes, when one has ended, to report why and to give the folder back
MODULE = [sys.executable, "-m", "longspec.cluster.torchrun"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster launch", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=1, help="of how many the job is; default: 1")
    parser.add_argument("--ranks", type=int, required=True, help="processes on each node, one for each GPU")
    parser.add_argument("--cpus", type=int, default=1, help="cores of one of the Slurm job's tasks")
    parser.add_argument("--tasks", type=int, default=1, help="the Slurm job's tasks on each node, which share them")
    parser.add_argument("--gres", default="", help="the GPUs of each node as Slurm was asked for them, such as gpu:8")
    parser.add_argument("--log", type=Path, help="becomes a link to this attempt's log; default: the terminal")
    parser.add_argument("--plain", action="store_true", help="one rank is started as any program, without torchrun")
    parser.add_argument("module", nargs=argparse.REMAINDER, help="-- module and its arguments")
    return parser


def is_batch_step(options: argparse.Namespace) -> bool:
    """Whether this is the first process of a Slurm job that has room for more than one task."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ and options.tasks > 1


def torchrun(options: argparse.Namespace, errors: Path | None) -> list[str]:
    """The command that starts the ranks of one node."""
    command = [*MODULE, f"--nproc-per-node={options.ranks}", f"--shutdown-timeout={PATIENCE}"]
    if errors is not None:
        command += [f"--log-dir={errors.resolve()}"]
    if options.nodes == 1:
        return [*command, "--standalone"]
    job = os.environ["SLURM_JOB_ID"]
    meeting = f"{nodes_of(job)[0]}:{FIRST_PORT + int(job) % PORTS}"
    rendezvous = {"nnodes": options.nodes, "rdzv-backend": "c10d", "rdzv-id": job, "rdzv-endpoint": meeting}
    return [*command, *(f"--{name}={value}" for name, value in rendezvous.items())]


def srun(options: argparse.Namespace, log: Path | None) -> list[str]:
    """The srun that starts a command once on each node of this Slurm job, with all of the node's cores and GPUs."""
    command = ["srun", f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--ntasks-per-node=1", "--mpi=none"]
    command += [f"--cpus-per-task={options.cpus * options.tasks}", "--kill-on-bad-exit=0", f"--wait={OTHERS}"]
    command += [f"--gres={options.gres}"] if options.gres else []
    # Written by the nodes themselves: the log goes on when the batch step, and srun with it, has ended first.
    return command + ([f"--output={log.resolve()}", "--open-mode=append"] if log else [])


def nodes_of(job: str) -> list[str]:
    """The names of a Slurm job's nodes; the executor has removed the variables that tell them. Raises ValueError."""

    def ask() -> list[str]:
        listed = squeue("--jobs", job, "--format", "%N").strip()
        names = answer_of(["scontrol", "show", "hostnames", listed]).split() if listed else []
        if not names:
            raise NoAnswerError(f"Slurm tells no nodes of job {job}")
        return names

    return ask_patiently(ask)


def checked(options: argparse.Namespace) -> list[str]:
    """The module and its arguments. Raises ValueError for what cannot be started."""
    module: list[str] = options.module[1:] if options.module[:1] == ["--"] else options.module
    if not module:
        raise ValueError("nothing to start: ... -- MODULE ARGUMENTS")
    for name in ("nodes", "ranks", "cpus", "tasks"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, is {getattr(options, name)}")
    if options.nodes > 1:
        job = os.environ.get("SLURM_JOB_ID")
        if job is None or shutil.which("srun") is None:
            raise ValueError(f"--nodes {options.nodes}: several nodes need a Slurm job; outside of one start torchrun on each")
        if "SLURM_STEP_ID" in os.environ:
            raise ValueError(
                f"--nodes {options.nodes}: this is a job step on one node; give the rule the resources mpi=srun and"
                " tasks_per_node=<GPUs of a node> beside nodes (profiles/slurm/profile.yaml does)"
            )
        nodes = nodes_of(job)
        if len(nodes) != options.nodes:
            raise ValueError(f"--nodes {options.nodes}, but Slurm job {job} has {len(nodes)}: {', '.join(nodes)}")
    return module


def environment(options: argparse.Namespace) -> dict[str, str]:
    """This process's environment with the threads of each rank."""
    threads = str(max(1, options.cpus * options.tasks // options.ranks))
    return os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def start(command: list[str], output: TextIO, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """The launcher below, which hears of each signal once.

    Slurm signals a job's processes by itself. Elsewhere the launcher has a session of its own, in which a terminal's Ctrl-C
    does not reach it: it is told by this process, and ends with it. A second signal would end torchrun's patience.
    """
    in_slurm = "SLURM_JOB_ID" in os.environ
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=not in_slurm,
        preexec_fn=die_with_parent,
    )

    def pass_on(number: int, _: object) -> None:
        if not in_slurm:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return process


def run(options: argparse.Namespace, log: Path | None, output: TextIO) -> int:
    """One attempt, from its first line to the failing rank's last words."""
    module = checked(options)
    errors = log.with_suffix(".errors") if log else None
    command = [*torchrun(options, errors), "-m", *module]
    warning = ""
    if options.nodes > 1 or (is_batch_step(options) and shutil.which("srun")):
        command = [*srun(options, log), *command]
    elif is_batch_step(options):
        warning = "no srun here, as in a container: Slurm tells these processes of no end before it kills them\n"
    where = f"{socket.gethostname()}, Slurm job {own_job() or 'none'}"
    output.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {where}: {shlex.join(command)}\n")
    output.write(warning)
    if options.tasks > options.ranks:
        output.write(f"{options.ranks} processes share the cores of {options.tasks} tasks on each node\n")
    output.flush()
    code = start(command, output, environment(options)).wait()
    if log and errors:
        if code:
            append_last_words(output, log, errors)
        shutil.rmtree(errors, ignore_errors=True)
    return 1 if code else 0


def main(argv: list[str]) -> int:
    """Start the ranks and wait for them; 0 when all have ended well."""
    options = parser().parse_args(argv)
    try:
        if options.plain and options.ranks * options.nodes == 1:
            command = [sys.executable, "-m", *checked(options)]
            os.execve(sys.executable, command, environment(options))
        log = new_log(options.log) if options.log else None
        with log.open("a", encoding="utf-8") if log else nullcontext(sys.stdout) as output:
            try:
                return run(options, log, output)
            except ValueError as error:
                for place in (output, sys.stderr) if log else (sys.stderr,):
                    print(f"error: {one_line(error)}", file=place)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
    return 1
