"""Training jobs as processes of their own, as users and the workflow start them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec.atomic_files import write_text
from longspec.config import compose, to_yaml
from longspec.jsonl import whole_lines
from tests.warm_jobs import popen, rank_of

RUNTIME = ["runtime.micro_batch=1", "runtime.save_every=4", "runtime.held_out_every=0"]
RECIPE = ["run=demo", "recipe.draft.start=random", "recipe.global_batch=4", "recipe.steps=24", "recipe.data.sequence_length=48"]
RECIPE += ["recipe.draft.window=20", "recipe.draft.max_position=400", "recipe.optimizer.lr=1e-2", *RUNTIME]
EAGLE3 = ["run=demo-eagle3", "recipe.global_batch=4", "recipe.steps=12", "recipe.data.sequence_length=48"]
EAGLE3 += ["recipe.draft.steps=3", "recipe.method.vocabulary=40", "recipe.optimizer.lr=1e-3", *RUNTIME]
EAGLE3 += ["recipe.optimizer.name=adamw"]  # which every ZeRO stage can have
DFLASH = ["run=demo-dflash", *(each for each in EAGLE3 if not each.startswith(("run=", "recipe.draft.")))]
DFLASH += ["recipe.method.block_size=4"]
PLAIN = [sys.executable]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def deepspeed(ranks: int) -> list[str]:
    """The `deepspeed` command, on a port below those that Linux gives away; its own is the same for every job."""
    command = [sys.executable, str(Path(sys.executable).with_name("deepspeed"))]
    return [*command, f"--num_gpus={ranks}", f"--master_port={30500 + os.getpid() % 2000}", "--module"]


@dataclass
class Job:
    """One stage's folder and how it is started."""

    out: Path
    target: Path
    data: Path
    overrides: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=lambda: PLAIN)
    base: list[str] = field(default_factory=lambda: RECIPE)
    vocabulary: Path | None = None
    init_weights: Path | None = None
    began: float = 0.0  # when it was last started, in seconds since 1970

    def freeze(self) -> None:
        config = compose("train", [*self.base, *self.overrides])
        write_text(self.out / "recipe.yaml", to_yaml(config.recipe))
        write_text(self.out / "runtime.yaml", to_yaml(config.runtime))

    def command(self) -> list[str]:
        files = {"recipe": self.out / "recipe.yaml", "runtime": self.out / "runtime.yaml", "target": self.target}
        options = [f"--{name}={path}" for name, path in (files | {"data": self.data, "out": self.out}).items()]
        options += [] if self.vocabulary is None else [f"--vocabulary={self.vocabulary}"]
        options += [] if self.init_weights is None else [f"--init-weights={self.init_weights}"]
        module = ["longspec.train"] if self.launcher[-1] == "--module" else ["-m", "longspec.train"]
        return [*self.launcher, *module, *options]

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.freeze()
        self.began = time.time()
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

    def written(self) -> list[dict[str, Any]]:
        """The rows of the steps done; not those of a job before that the last start has yet to drop."""
        path = self.out / "checkpoints/metrics.jsonl"
        return whole_lines(path) if path.exists() and path.stat().st_mtime > self.began else []

    def status(self) -> dict[str, Any]:
        return json.loads((self.out / "status.json").read_text())

    def step(self) -> int:
        """The last step written down."""
        return len(self.written())

    def wait_for(self, step: int, process: subprocess.Popen[str]) -> None:
        self.wait_until(lambda: self.step() >= step, process)

    def wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert process.poll() is None, finish(process)[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)


MakeJob = Callable[..., Job]


def start(command: list[str], out: Path) -> subprocess.Popen[str]:
    """A process whose compiled extensions would show in out/extensions."""
    (out / "extensions").mkdir(parents=True, exist_ok=True)
    # DeepSpeed compiles Muon when it is imported, used or not, which takes a sixth of a job's start.
    lean = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = os.environ | lean | {"TORCH_EXTENSIONS_DIR": str(out / "extensions")}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[str]) -> tuple[str, int]:
    """All that a job printed, and its exit code."""
    try:
        text, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired as late:
        kill_all(process)
        process.wait()
        raise AssertionError(f"it did not end:\n{(late.output or b'').decode(errors='replace')[-6000:]}") from None
    return text, process.returncode


def children_of(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return found


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for child in children_of(pid):
        yield from family(child)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of a launcher's ranks; the `deepspeed` command's are its grandchildren."""
    found: dict[int, int] = {}
    launchers = [process.pid, *children_of(process.pid)]
    for child in [child for launcher in launchers for child in children_of(launcher)]:
        with suppress(OSError):
            if (forked := rank_of(child)) is not None:
                found.setdefault(forked, child)
                continue
            environment = Path(f"/proc/{child}/environ").read_text().split("\0")
            for entry in environment:
                if entry.startswith("RANK="):  # which a rank's own children inherit
                    found.setdefault(int(entry.removeprefix("RANK=")), child)
    return found


def kill_rank(process: subprocess.Popen[str], rank: int) -> int:
    """SIGKILL the process of one rank (a child of torchrun); its id. The others learn of it in some ten seconds."""
    pid = ranks_of(process)[rank]
    os.kill(pid, signal.SIGKILL)
    return pid


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL a launcher and its ranks at once, as a machine that fails does."""
    for pid in list(family(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
