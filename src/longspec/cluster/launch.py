"""Start a job's ranks by torchrun, here or on every node of the Slurm job, and keep a log of its own for each attempt.

    python -m longspec.cluster launch --nodes 2 --ranks 8 --log LOG -- longspec.train ARGUMENTS

Snakemake's executor starts jobs with the resource `mpi` in the batch step of a Slurm job. There each node's torchrun is the
task of a job step, also on one node: Slurm signals a step's task before it kills it, but in a batch step only the shell.
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

from longspec.cluster.attempt_logs import last_words, new_log
from longspec.distributed import GPUS_GIVEN, ON_PROCESSORS, die_with_parent
from longspec.shown import at_least, one_line
from longspec.slurm import NoAnswerError, answer_of, ask_patiently, own_job, squeue

# Ports below those that systems assign by themselves; two jobs that share a node have different ones.
FIRST_PORT, PORTS = 20000, 10000
PATIENCE = 600  # seconds that torchrun gives its ranks after SIGTERM to end their step and save; its own default is 30
OTHERS = 60  # seconds for the other nodes, once one has ended, to report why and give the folder back
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster launch", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=at_least(1), default=1, help="of how many the job is; default: 1")
    parser.add_argument("--ranks", type=at_least(1), required=True, help="processes on each node, one for each GPU")
    parser.add_argument("--cpus", type=at_least(1), default=1, help="cores of one of the Slurm job's tasks")
    parser.add_argument("--tasks", type=at_least(1), default=1, help="the Slurm job's tasks on each node, which share them")
    parser.add_argument("--gres", default="", help="the GPUs of each node as Slurm was asked for them, such as gpu:8")
    parser.add_argument("--log", type=Path, help="becomes a link to this attempt's log; default: the terminal")
    parser.add_argument("--plain", action="store_true", help="one rank is started as any program, without torchrun")
    parser.add_argument("module", nargs=argparse.REMAINDER, help="-- module and its arguments")
    return parser


def torchrun(options: argparse.Namespace) -> list[str]:
    """Return the command that starts the ranks of one node."""
    command = [*TORCHRUN, f"--nproc-per-node={options.ranks}", f"--shutdown-timeout={PATIENCE}"]
    command.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # by default not the last one
    if options.nodes == 1:
        return [*command, "--standalone"]
    job = os.environ["SLURM_JOB_ID"]
    meeting = f"{nodes_of(job)[0]}:{FIRST_PORT + int(job) % PORTS}"
    rendezvous = {"nnodes": options.nodes, "rdzv-backend": "c10d", "rdzv-id": job, "rdzv-endpoint": meeting}
    return [*command, *(f"--{name}={value}" for name, value in rendezvous.items())]


def srun(options: argparse.Namespace, log: Path | None) -> list[str]:
    """Return the srun that starts a command once on each node of this Slurm job, with all of the node's cores and GPUs."""
    command = ["srun", f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--ntasks-per-node=1", "--mpi=none"]
    command += [f"--cpus-per-task={options.cpus * options.tasks}", "--kill-on-bad-exit=0", f"--wait={OTHERS}"]
    command += [f"--gres={options.gres}"] if options.gres else []
    # The nodes write the log themselves, so that it goes on when the batch step, and srun with it, has ended first.
    return command + ([f"--output={log.resolve()}", "--open-mode=append"] if log else [])


def nodes_of(job: str) -> list[str]:
    """Return the names of a Slurm job's nodes; the executor has removed the variables that name them. Raises ValueError."""

    def ask() -> list[str]:
        listed = squeue("--jobs", job, "--format", "%N").strip()
        names = answer_of(["scontrol", "show", "hostnames", listed]).split() if listed else []
        if not names:
            raise NoAnswerError(f"Slurm tells no nodes of job {job}")
        return names

    return ask_patiently(ask)


def start(command: list[str], output: TextIO, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start the launcher, `command`, so that it gets each signal once.

    Slurm signals a job's processes by itself. Elsewhere the launcher has a session of its own, which a terminal's Ctrl-C does
    not reach: this process passes signals on, and the launcher ends with it. A second signal would end torchrun's patience.
    """
    in_slurm = own_job() is not None
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

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):  # nohup ignores it
            signal.signal(number, pass_on)
    return process


def run(options: argparse.Namespace, environment: dict[str, str], log: Path | None, output: TextIO) -> int:
    """Run and log one attempt, with the failing rank's last words; return 0 or 1. Raises ValueError if it cannot start."""
    in_step = "SLURM_STEP_ID" in os.environ
    if options.nodes > 1 and (in_step or own_job() is None):
        raise ValueError(
            f"--nodes {options.nodes}: several nodes need the batch step of a Slurm job; give the rule the resources mpi=srun "
            "and tasks_per_node=<GPUs of a node> beside nodes (profiles/slurm/profile.yaml does)"
        )
    command = [*torchrun(options), "-m", *options.module]
    is_batch_step = own_job() is not None and not in_step and options.tasks > 1
    if options.nodes > 1 or (is_batch_step and shutil.which("srun")):
        command = [*srun(options, log), *command]
    elif is_batch_step:
        output.write("no srun here, as in a container: Slurm tells these processes of no end before it kills them\n")
    where = f"{socket.gethostname()}, Slurm job {own_job() or 'none'}"
    output.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {where}: {shlex.join(command)}\n")
    output.flush()
    code = start(command, output, environment).wait()
    if log and code and (words := last_words(log.read_text(errors="replace"))):
        output.write(f"\nThis attempt ended (torchrun's table above names the rank that failed first):\n{words}\n")
    return 1 if code else 0


def main(argv: list[str]) -> int:
    """Start the ranks and wait for them; return 0 if all ended well, else 1."""
    options = parser().parse_args(argv)
    options.module = [word for place, word in enumerate(options.module) if place or word != "--"]
    if not options.module:
        print("error: nothing to start: ... -- MODULE ARGUMENTS", file=sys.stderr)
        return 1
    threads = str(max(1, options.cpus * options.tasks // options.ranks))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if own_job() and "gpu" in options.gres and not os.environ.get(ON_PROCESSORS):
        environment[GPUS_GIVEN] = options.gres
    if options.plain and options.ranks * options.nodes == 1:
        os.execve(sys.executable, [sys.executable, "-m", *options.module], environment)
    log = new_log(options.log) if options.log else None
    with log.open("a", encoding="utf-8") if log else nullcontext(sys.stdout) as output:
        try:
            return run(options, environment, log, output)
        except (ValueError, OSError) as error:
            for place in (output, sys.stderr) if log else (sys.stderr,):
                print(f"error: {one_line(error)}", file=place)
    return 1
