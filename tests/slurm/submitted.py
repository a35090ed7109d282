"""A stage of the workflow as Slurm jobs, watched from outside."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from longspec.atomic_files import write_text
from longspec.distributed import ON_PROCESSORS
from longspec.jsonl import whole_lines
from longspec.train.checkpoint.save_load import draft_state_dict
from tests.workflow.planning import Workflow

STAGE = "results/demo/sinkpi-slicing/base"
TARGET_RULE = f"{STAGE}/checkpoint.json"
LOG = "logs/train/demo/sinkpi-slicing/base"
CLUSTER = ["--profile", "slurm", "--profile", "tests/slurm/profile"]
SECONDS = 600


@dataclass
class Submitted(Workflow):
    """A copy of the workflow in which all that stage 1 reads is built, and the processes started in it."""

    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def copy(self, folder: Path) -> "Submitted":
        """Another one."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Submitted(folder)

    def set(self, resource: str, value: object) -> None:
        """A resource of the stage's job, in the profile; on the command line it would take the place of all others."""
        self.edit("tests/slurm/profile/profile.yaml", rf"^    {resource}: .*$", f"    {resource}: {value}")

    def pace(self, seconds: float) -> None:
        """How long a step lasts from now on, beside what it computes."""
        write_text(self.folder / "pace", f"{seconds}")

    def environment(self) -> dict[str, str]:
        """The copy's own code, in its jobs too, whose GPUs are declared and not there."""
        return os.environ | {ON_PROCESSORS: "1", "PYTHONPATH": f"{self.folder / 'src'}:{self.folder}"}

    def start(self, *wanted: str) -> "subprocess.Popen[str]":
        """Snakemake on the cluster, in a session of its own as on a login node; it wants the stage unless told else."""
        return self.popen([sys.executable, "-m", "tests.slurm.impatient", *CLUSTER, *(wanted or (TARGET_RULE,))])

    def popen(self, command: list[str]) -> "subprocess.Popen[str]":
        """A process in the copy's folder; what it prints goes into output.log there."""
        with (self.folder / "output.log").open("a") as output:
            options = {"stdout": output, "stderr": output, "text": True, "start_new_session": True}
            process = subprocess.Popen(command, cwd=self.folder, env=self.environment(), **options)
        self.started.append(process)
        return process

    def end_all(self) -> None:
        """What a failed test has left; the sessions' other processes end with their Snakemake's jobs."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def output_so_far(self) -> str:
        return (self.folder / "output.log").read_text()

    def finish(self, process: "subprocess.Popen[str]", code: int = 0) -> str:
        """All that was printed; it must end with this code."""
        ended = process.wait(SECONDS)
        assert (ended == 0) == (code == 0), self.output_so_far()[-6000:]
        return self.output_so_far()

    def make(self, *words: str) -> None:
        """Snakemake without Slurm."""
        self.finish(self.popen([sys.executable, "-m", "snakemake", "--cores", "2", *words]))

    def rows(self) -> list[dict[str, Any]]:
        """The steps that are done."""
        return whole_lines(self.folder / STAGE / "checkpoints/metrics.jsonl")

    def curve(self) -> list[tuple[int, float]]:
        """Step and loss of the finished stage."""
        lines = (self.folder / STAGE / "metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["loss"]) for row in map(json.loads, lines)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the newest checkpoint."""
        return draft_state_dict(self.folder / STAGE / "checkpoints/last")

    def attempts(self) -> list[Path]:
        """The logs of all attempts."""
        return sorted((self.folder / LOG).glob("attempt-*.log"))

    def start_seconds(self) -> float:
        """How long the first attempt took from its launch to its first step."""
        log = self.attempts()[0].read_text()
        launched, stepped = re.search(r"^\S+ (\S+) on ", log), re.search(r"^(\S+) step 1/", log, re.MULTILINE)
        begin, end = (datetime.strptime(found[1], "%H:%M:%S") for found in (launched, stepped))
        return float((end - begin).seconds)  # of a day: midnight may lie between

    def job(self, attempt: int) -> str:
        """The Slurm job of an attempt, counted from 1."""
        return self.attempts()[attempt - 1].stem.split("-job-")[1]

    def wait_for(self, attempt: int, more_steps: int, process: "subprocess.Popen[str]") -> None:
        """Until an attempt has done some steps, which it has told its log."""

        def done() -> bool:
            logs = self.attempts()
            return len(logs) >= attempt and logs[attempt - 1].read_text().count(" tokens/s\n") >= more_steps

        self.wait_until(done, process)

    def wait_until(self, condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert process.poll() is None, self.output_so_far()[-6000:]
            assert time.monotonic() < end, self.output_so_far()[-6000:]
            time.sleep(0.2)


def state_of(job: str) -> str:
    """A job's state, also of one that has ended; empty when Slurm does not answer."""
    command = ["squeue", "--noheader", "--states=all", "--jobs", job, "--format", "%T"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
