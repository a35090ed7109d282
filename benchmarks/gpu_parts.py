"""The parts of benchmarks/gpu.py: each runs commands within its time, keeps what it finds, and goes on from that."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / f".gpu/{sys.version_info.major}.{sys.version_info.minor}"  # what make gpu-packages has brought along
GRACE = 15  # seconds in which a command may end by itself
STAGE, KILL_AT = "results/demo/sinkpi-slicing/base", 200  # the stage and the step at which it is killed


class StoppedError(Exception):
    """A part's time is over."""


@dataclass(frozen=True)
class Parts:
    """The parts. Each returns its result, and goes on from what it left in `out` and `work`."""

    out: Path
    work: Path
    tiny: bool
    end: float = 0.0  # of the part that runs, on time.monotonic's clock

    @property
    def copy(self) -> Path:
        """The copy of the workflow, whose code every part runs."""
        return self.work / "copy"

    def environment(self) -> dict[str, str]:
        """Return a command's environment."""
        paths = [str(path) for path in (self.copy / "src", ROOT, PACKAGES, os.environ.get("PYTHONPATH", "")) if str(path)]
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return os.environ | {"PYTHONPATH": ":".join(paths), "PATH": programs, "PYTHONUNBUFFERED": "1"}

    def start(self, command: list[str], log: Path, cwd: Path) -> "subprocess.Popen[bytes]":
        """Start a command in a session of its own, which ends with this process; its output is added to a log."""
        from longspec.distributed import die_with_parent

        log.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"cwd": cwd, "env": self.environment(), "preexec_fn": die_with_parent}
        with log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, **options)

    def call(self, command: list[str], log: Path, cwd: Path = ROOT, well: tuple[int, ...] = (0,)) -> None:
        """Run a command. Raises RuntimeError with the log's end when it fails, StoppedError when the part's time is over."""
        process = self.start(command, log, cwd)
        try:
            code = process.wait(max(0.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            end(process)
            raise StoppedError from error
        if code not in well:
            words = log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"{' '.join(command[:6])} ... ended with {code}:\n{words}")

    def tests(self) -> dict[str, Any]:
        """Run the tests marked gpu that have no outcome yet, and count them all."""
        from benchmarks.gpu_tests import outcomes

        kept = self.out / "gpu_tests.jsonl"
        command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "benchmarks.gpu_tests", f"--kept={kept}", "-p", "no:cacheprovider"]
        holders = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        command += ["--continue-on-collection-errors", *(holders[:1] if self.tiny else holders)]
        self.call([sys.executable, *command], self.out / "gpu_tests.log", well=(0, 1, 5))  # failures; nothing left to run
        found = outcomes(kept)
        of_kind = {kind: {k: why for k, (outcome, why) in found.items() if outcome == kind} for kind in ("failed", "skipped")}
        passed = sum(outcome == "passed" for outcome, _ in found.values())
        return {"passed": passed, "failed": of_kind["failed"], "skipped": Counter(of_kind["skipped"].values())}

    def script(self, name: str, *options: str) -> dict[str, Any]:
        """Run another benchmark, which keeps its own lines."""
        self.call([sys.executable, f"benchmarks/{name}.py", "--out", str(self.out), *options], self.out / f"{name}.log")
        return {}

    def attention(self) -> dict[str, Any]:
        """Measure the backends."""
        return self.script("attention", "--lengths", *(("64",) if self.tiny else ("1024", "8192", "32768")))

    def steps(self) -> dict[str, Any]:
        """Measure training steps."""
        return self.script("gpu_steps", *(("--tiny",) if self.tiny else ()))

    def decode(self) -> dict[str, Any]:
        """Measure decoding."""
        return self.script("gpu_decode", *(("--tiny",) if self.tiny else ()))

    def demo(self) -> dict[str, Any]:
        """Run the demo's graph; what the report says of it, and the seconds of its stages."""
        snakemake, log = [sys.executable, "-m", "snakemake", "final_draft", "--cores", "all"], self.out / "gpu_demo.log"
        self.call([*snakemake, "--unlock"], log, self.copy)
        self.call(snakemake, log, self.copy)
        report = json.loads((self.copy / "results/demo/report.json").read_text(encoding="utf-8"))
        (variant,) = report["overall"]
        speed = {drafter: found["speed_up"]["mean"] for drafter, found in report["speed"][variant].items()}
        drafters = {drafter: {**tau, "speed_up": speed[drafter]} for drafter, tau in report["overall"][variant].items()}
        stages = {}
        for path in sorted((self.copy / "results/demo").glob("*/*/checkpoint.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            last = json.loads((path.parent / "metrics.jsonl").read_text().splitlines()[-1])
            shown = {key: last.get(key) for key in ("loss", "tokens_per_second", "mfu", "peak_gpu_bytes")}
            stages[path.parent.name] = {"steps": content["step"], "seconds": content["training_seconds"], **shown}
        return {"drafters": drafters, "lossless": report["lossless"][variant], "stages": stages}

    def resume(self) -> dict[str, Any]:
        """Compare a stage that was killed half way with one that was not, and with the demo's own."""
        if not (self.copy / STAGE / "draft/model.safetensors").is_file():
            raise RuntimeError("there is no demo yet: its part comes first")
        whole, killed = self.train("whole", None), self.train("killed", KILL_AT)
        if not killed["began"]:
            raise RuntimeError("the killed stage began anew")
        own = sha256((self.copy / STAGE / "draft/model.safetensors").read_bytes()).hexdigest()
        same = {"bit_equal": whole["sha256"] == killed["sha256"], "as_in_the_demo": whole["sha256"] == own}
        return same | {"resumed_at": killed["began"], "sha256": whole["sha256"]}

    def train(self, name: str, kill_at: int | None) -> dict[str, Any]:
        """Train the demo's first stage, killed once at a step where one is given.

        Returns the step at which it began to train to its end, and the SHA-256 of its draft; once it is done, what was found.
        """
        import yaml

        folder = self.work / name
        done = folder / "done.json"
        if done.is_file():
            return dict(json.loads(done.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(self.copy / STAGE / "recipe.yaml", folder)
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        runtime = yaml.safe_load((self.copy / STAGE / "runtime.yaml").read_text()) | {"extract_at_end": True}
        (folder / "runtime.yaml").write_text(yaml.safe_dump(runtime))
        data, model = recipe["data"], recipe["model"]["name"]
        packed = "-".join(str(data[key]) for key in ("name", "collation", "sequence_length", "overlong"))
        files = {"recipe": folder / "recipe.yaml", "runtime": folder / "runtime.yaml", "out": folder}
        files |= {"target": f"models/{model}/target_manifest.json", "data": f"data/packed/{model}/{packed}/manifest.json"}
        command = [sys.executable, "-m", "longspec.train", *(f"--{option}={path}" for option, path in files.items())]
        if kill_at is not None:
            self.kill(command, folder, kill_at)
        self.call(command, folder / "train.log", self.copy)
        began = next(line for line in (folder / "train.log").read_text().splitlines() if "starting at step" in line)
        found = {"began": int(began.rsplit(" ", 1)[1])}
        found |= {"sha256": sha256((folder / "draft/model.safetensors").read_bytes()).hexdigest()}
        done.write_text(json.dumps(found))
        return found

    def kill(self, command: list[str], folder: Path, step: int) -> None:
        """Kill a training when it is so far. Raises RuntimeError when it ends by itself, StoppedError when time is over."""
        process, status = self.start(command, folder / "killed.log", self.copy), folder / "status.json"
        while process.poll() is None and time.monotonic() < self.end:
            if status.is_file() and json.loads(status.read_text())["step"] >= step:
                break
            time.sleep(0.05)
        ended = process.poll() is not None
        end(process, signal.SIGKILL)
        if ended:
            raise RuntimeError(f"it was not killed at step {step}:\n{(folder / 'killed.log').read_text()[-1500:]}")
        if time.monotonic() >= self.end:
            raise StoppedError


def end(process: "subprocess.Popen[bytes]", number: int = signal.SIGINT) -> None:
    """End a command with all of its session: as Ctrl-C does, then for sure."""
    for each in (number, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, each)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


# Each part with what it keeps in `out` and `work`, removed when a part that is done begins again.
PARTS: dict[str, tuple[Callable[[Parts], dict[str, Any]], tuple[str, ...]]] = {
    "tests": (Parts.tests, ("gpu_tests.jsonl",)),
    "attention": (Parts.attention, ("attention_cuda.jsonl", "attention_cpu.jsonl")),
    "steps": (Parts.steps, ("gpu_steps.jsonl",)),
    "decode": (Parts.decode, ("gpu_decode.jsonl",)),
    "demo": (Parts.demo, ("copy/results", "copy/.snakemake")),
    "resume": (Parts.resume, ("whole", "killed")),
}
