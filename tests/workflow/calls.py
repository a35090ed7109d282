"""Calls of Snakemake in a folder of its own, their jobs and processes, and what strikes them."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from tests import warm_jobs
from tests.jobs import children_of
from tests.workflow.warm_python import KEEPER, SERVER

MARK = "LONGSPEC_CHAOS"  # in the environment of all processes of one place
OPTIONS = ("final_draft", "--cores", "2", "--set-resources", "train:ranks=2", "--config")
PATIENCE = 600  # seconds for a call to end
TOLD = re.compile(r"^(?:\S+: )?error: |; have it made again after: ")  # what is wrong, by a job or by the plan
NAMED = re.compile(r"longspec\.(?!cluster launch|train plan)(\w+)(?: ([a-z-]+))?")


def tree(pid: int, warm: Path) -> list[int]:
    """A process and all its descendants; the fork that a process stands for is one."""
    return [pid, *(each for child in [*children_of(pid), *forks(pid, warm)] for each in tree(child, warm))]


def forks(pid: int, warm: Path) -> list[int]:
    """The fork that a process stands for, if it stands for one."""
    file = warm / "forks" / str(pid)
    return [int(file.read_text())] if file.exists() and file.read_text() else []


def read(pid: int, name: str) -> str:
    """A file of a process, empty when that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


@contextmanager
def begun(command: list[str], folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """A command whose job makes the file `begun`, in a process group of its own, as a terminal starts it."""
    more = {"stdout": PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=folder, **more) as process:
        while not (folder / "begun").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process


def kill(number: int, *pids: int) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def job_name(pid: int) -> str:
    """The verb that a job's process runs, such as `data tokenize`."""
    found = NAMED.search(read(pid, "cmdline").replace("\0", " "))
    return " ".join(filter(None, found.groups())) if found else ""


@dataclass
class Place:
    """A folder with a copy of the workflow, and the run that is called for."""

    folder: Path
    run: str

    @property
    def said(self) -> Path:
        """All that the last call has printed."""
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def warm(self) -> Path:
        """The folder of warm_python."""
        return self.folder.with_name(f"warm-{self.folder.name}")

    def command(self, *arguments: str) -> list[str]:
        """Snakemake as a user types it."""
        return [str(self.warm / "bin/python"), "-m", "snakemake", *arguments, *OPTIONS, f"runs=[{self.run}]"]

    @contextmanager
    def warmed(self, root: Path) -> Iterator[None]:
        """Within the block there is a warm python. root: of the repository."""
        shutil.rmtree(self.warm, ignore_errors=True)
        environment = self.environment() | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        environment["PYTHONPATH"] += f"{os.pathsep}{root}"
        command = [sys.executable, "-m", "tests.workflow.warm_python", str(self.warm)]
        with subprocess.Popen(command, cwd=self.folder, env=environment, stdin=PIPE, stdout=PIPE) as server:
            assert any(line == b"ready\n" for line in server.stdout), "it ends while it imports"
            try:
                yield
            finally:
                self.end()
                server.stdin.close()

    def environment(self) -> dict[str, str]:
        """A user's, with the copy's own source."""
        kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
        own = {"PYTHONPATH": str(self.folder / "src"), MARK: str(self.folder), "BASH_ENV": str(self.warm / "path.sh")}
        return kept | own | {"COLUMNS": "200"}

    def call(self) -> "Call":
        """Start Snakemake as a user does, in a process group of its own as of a terminal."""
        with self.said.open("w") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(self.command(), cwd=self.folder, env=self.environment(), **options)
        return Call(self, process)

    def output(self, *arguments: str) -> str:
        """What a short call of Snakemake prints, which must end well."""
        command, where = self.command(*arguments), {"cwd": self.folder, "env": self.environment()}
        done = subprocess.run(command, **where, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def processes(self) -> list[int]:
        """All processes of the place, orphans too."""
        mark = f"{MARK}={self.folder}\0"
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        found = [pid for pid in pids if mark in read(pid, "environ")]
        return sorted(pid for pid in found if read(pid, "comm").strip() not in (SERVER, KEEPER))

    def wait_for_orphans(self) -> None:
        """Until no process of the place is left."""
        deadline = time.monotonic() + PATIENCE
        while self.processes():
            assert time.monotonic() < deadline, f"{self.processes()} do not end"
            time.sleep(0.2)

    def end(self) -> None:
        """SIGKILL to all processes of the place."""
        kill(signal.SIGKILL, *self.processes())


@dataclass
class Call:
    """Snakemake while it runs."""

    place: Place
    process: subprocess.Popen[bytes]
    current: int = 0  # the job that it was waited for

    @property
    def snakemake(self) -> int:
        """The process that is Snakemake; 0 before it is there."""
        return next(iter(forks(self.process.pid, self.place.warm)), 0)

    @property
    def code(self) -> int:
        """How it has ended."""
        assert self.process.returncode is not None
        return self.process.returncode

    def wait_for(self, passed: int, share: float, times: dict[str, float], *, ranks: bool = False) -> str:
        """Until so many jobs have begun and the next has done a share of its work; its name, empty when the call ends first.

        ranks: one of a training.
        """
        seen: set[int] = set()
        while self.process.poll() is None:
            for pid in children_of(self.snakemake):
                name = job_name(pid)
                if name and pid not in seen:
                    seen.add(pid)
                    if (len(seen) > passed and not ranks) or (ranks and name == "train"):
                        self.current = pid
                        return self._work(name, share * times.get(name, 1.0), ranks)
            time.sleep(0.05)
        return ""

    def _work(self, name: str, seconds: float, ranks: bool) -> str:
        until = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > until and (not ranks or self.ranks() or not Path(f"/proc/{self.current}").exists()):
                return name
            time.sleep(0.05)
        return ""

    def watch(self) -> dict[str, float]:
        """Until its end; the seconds that jobs of each name have taken."""
        began: dict[int, tuple[str, float]] = {}
        times: dict[str, float] = {}
        while self.process.poll() is None:
            now = time.monotonic()
            for pid in children_of(self.snakemake):
                if name := job_name(pid):
                    _, since = began.setdefault(pid, (name, now))
                    times[name] = max(times.get(name, 0.0), now - since)
            time.sleep(0.1)
        return times

    def ranks(self) -> list[int]:
        """The processes that are a rank of the job."""
        return [pid for pid in tree(self.current, self.place.warm) if read(pid, "comm").startswith(warm_jobs.NAME)]

    def strike(self, kind: str, draw: random.Random) -> str:
        """Send the signal that a kind says, to whom it says; the victim."""
        of_job = tree(self.current, self.place.warm)[1:]  # without the shell
        strikes: dict[str, Callable[[], list[int]]] = {
            "SIGKILL to a process": lambda: [draw.choice(tree(self.current, self.place.warm))],
            "SIGKILL to a job": lambda: of_job,
            "SIGKILL to everything": self.place.processes,
            "SIGKILL to Snakemake": lambda: [self.snakemake],
            "SIGTERM to Snakemake": lambda: [self.snakemake],
            "vanished rank": lambda: [draw.choice(self.ranks() or [self.current])],
        }
        number = getattr(signal, kind.split()[0], signal.SIGKILL)
        if kind.endswith("the group"):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            return "its process group"
        victims = strikes[kind]()
        told = ", ".join(filter(None, (read(pid, "comm").strip() for pid in victims[:4])))
        kill(number, *victims)
        return told

    def finish(self) -> None:
        """Wait for its end; what hangs is killed, and told as hanging by its exit code."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.place.end()
            self.process.wait()
            raise AssertionError(f"it does not end:\n{self.text()[-6000:]}") from None

    def text(self) -> str:
        """All that it has printed, the logs of failed jobs with it."""
        return self.place.said.read_text(errors="replace")

    def refused(self) -> str:
        """The lines in which jobs, or the plan, tell what is wrong."""
        return "\n".join(line for line in self.text().splitlines() if TOLD.search(line))
