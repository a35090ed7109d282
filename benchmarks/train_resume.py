"""From the start of a killed stage's process to its first new step: python benchmarks/train_resume.py

The demo's last stage (`make demo` first) is stopped half way and started again, REPEATS times on a copy of its checkpoint.
Bars: importing torch, transformers and DeepSpeed takes longer than anything of ours; opening the data and reading the first
batch take less than a second.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGE = "results/demo/sinkpi-slicing/longcot"
STOPPED_AFTER, REPEATS = 40, 5  # steps, resumed starts
BEGAN = "LONGSPEC_BENCHMARK_BEGAN"
# Parts of a start: functions of the trainer, by the name under which their times are added up.
DATA, IMPORTS = "open the data, wait for the first batch", "imports"
PARTS = {
    "boot": "process group",
    "open_rows": DATA,
    "build_trainer": "load target and draft",
    "check_memory": "dry batch",
    "build_engine": "DeepSpeed engine",
    "find_resumable": "read the checkpoint",
    "load": "read the checkpoint",
    "Trackers": "trackers",
}


def resume() -> None:
    """In a process of its own, as the launcher starts it: the trainer until its first step, then the times on stdout."""
    import longspec.train.__main__ as trainer

    times = {IMPORTS: time.monotonic() - float(os.environ[BEGAN])}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            result = function(*arguments, **named)
            times[part] = times.get(part, 0.0) + time.monotonic() - began
            return result

        return call

    def first_step(*arguments: Any, **named: Any) -> None:
        loading = times[DATA]
        began = time.monotonic()
        step(*arguments, **named)
        now = time.monotonic()
        times["first step"] = now - began - (times[DATA] - loading)
        times["total"] = now - float(os.environ[BEGAN])
        print(json.dumps(times), flush=True)
        os._exit(0)

    step = trainer.train_step
    for name, part in PARTS.items():
        owner = trainer.save_load if name == "load" else trainer
        setattr(owner, name, timed(part, getattr(owner, name)))
    trainer.ReadAhead.take = timed(DATA, trainer.ReadAhead.take)  # type: ignore[method-assign]
    trainer.train_step = first_step  # type: ignore[assignment]
    trainer.main()


def options(out: Path, stage: Path, root: Path) -> list[str]:
    """The trainer's command line for the stage, into another folder; its input files as its own frozen paths say."""
    recipe = json.loads((stage / "checkpoint.json").read_text())["identity"]["recipe"]
    data, name = recipe["data"], recipe["model"]["name"]
    packed = f"data/packed/{name}/{data['name']}-{data['collation']}-{data['sequence_length']}-{data['overlong']}"
    files = {"recipe": stage / "recipe.yaml", "runtime": stage / "runtime.yaml", "out": out}
    files |= {"target": root / f"models/{name}/target_manifest.json", "data": root / packed / "manifest.json"}
    files["init-weights"] = stage.parent / "long/draft/model.safetensors"
    return [f"--{option}={path}" for option, path in files.items()]


def main() -> None:
    """Stop the stage once, resume it often."""
    import machine

    stage = machine.ROOT / STAGE
    if not (stage / "checkpoint.json").exists():
        raise SystemExit(f"error: {STAGE} is not trained; run `make demo` first")
    begun = machine.WORK / "resume" / "begun"
    shutil.rmtree(begun.parent, ignore_errors=True)
    log = begun / "checkpoints/metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "longspec.train", *options(begun, stage, machine.ROOT)])
    while not log.exists() or log.read_text().count("\n") < STOPPED_AFTER:
        if process.poll() is not None:
            raise SystemExit("error: the stage ended before it was stopped")
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.wait()
    runs = []
    for repeat in range(REPEATS):
        out = begun.parent / str(repeat)
        shutil.copytree(begun, out)
        command = [sys.executable, str(Path(__file__).resolve()), *options(out, stage, machine.ROOT)]
        environment = os.environ | {BEGAN: str(time.monotonic())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print({part: round(seconds, 2) for part, seconds in runs[-1].items()}, flush=True)
    middle = {part: round(statistics.median(run[part] for run in runs), 3) for part in runs[0]}
    ours = max(seconds for part, seconds in middle.items() if part not in (IMPORTS, "total"))
    numbers = {"machine": machine.describe(("torch", "transformers", "deepspeed")), "seconds": middle, "runs": runs}
    numbers["holds"] = middle[IMPORTS] > ours and middle[DATA] < 1
    machine.write("train_resume", numbers)


if __name__ == "__main__":
    resume() if BEGAN in os.environ else main()
