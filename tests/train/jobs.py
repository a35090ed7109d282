"""Training jobs as processes of their own, as users and the workflow start them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec.artefact import write_text
from longspec.config import compose, to_yaml

RECIPE = [
    "run=demo",
    "recipe.global_batch=4",
    "recipe.steps=40",
    "recipe.data.sequence_length=48",
    "recipe.draft.window=20",
    "recipe.draft.max_position=400",
    "recipe.optimizer.lr=1e-2",
    "runtime.micro_batch=1",
    "runtime.save_every=8",
]
PLAIN = [sys.executable]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


@dataclass
class Job:
    """One stage's folder and how it is started."""

    out: Path
    target: Path
    data: Path
    overrides: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=lambda: PLAIN)
    base: list[str] = field(default_factory=lambda: RECIPE)
    init_weights: Path | None = None

    def freeze(self) -> None:
        config = compose("train", [*self.base, *self.overrides])
        write_text(self.out / "recipe.yaml", to_yaml(config.recipe))
        write_text(self.out / "runtime.yaml", to_yaml(config.runtime))

    def command(self) -> list[str]:
        files = {"recipe": self.out / "recipe.yaml", "runtime": self.out / "runtime.yaml", "target": self.target}
        options = [f"--{name}={path}" for name, path in (files | {"data": self.data, "out": self.out}).items()]
        options += [] if self.init_weights is None else [f"--init-weights={self.init_weights}"]
        return [*self.launcher, "-m", "longspec.train", *options]

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.freeze()
        return start([*self.command(), *options], self.out)

    def run(self) -> str:
        """The whole log; the job must end well."""
        text, code = finish(self.start())
        assert code == 0, f"exit code {code}; the log's end:\n{text[-6000:]}"
        return text

    def refusal(self) -> str:
        """The log of a job that must end with an error of ours."""
        text, code = finish(self.start())
        assert code != 0, text
        assert "error: " in text
        return text

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def step(self) -> int:
        """The last step written down."""
        path = self.out / "checkpoints/metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for(self, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while self.step() < step:
            assert process.poll() is None, finish(process)[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)


MakeJob = Callable[..., Job]


def start(command: list[str], out: Path) -> subprocess.Popen[str]:
    """A process whose compiled extensions would show in out/extensions."""
    (out / "extensions").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(out / "extensions")}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[str]) -> tuple[str, int]:
    text, _ = process.communicate(timeout=300)
    return text, process.returncode


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of a launcher's ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_text().split("\0")
        found |= {int(entry.removeprefix("RANK=")): int(child) for entry in environment if entry.startswith("RANK=")}
    return found


def kill_rank(process: subprocess.Popen[str], rank: int) -> None:
    """SIGKILL the process of one rank (a child of torchrun)."""
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
