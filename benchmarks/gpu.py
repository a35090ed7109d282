"""All that only a GPU can show, in parts that keep their results; each command ends within nine minutes: make gpu

    python benchmarks/gpu.py                        every part that has no result yet
    python benchmarks/gpu.py demo resume            these parts, again
    python benchmarks/gpu.py --out FOLDER           where results go (default benchmarks/results)

* tests      the tests marked `gpu`: attention backends, losses, batches from pinned memory, times by CUDA's events
* demo       the embedded default's run, trained and measured on the GPU; results/demo is removed first
* resume     its first stage once as it is and once killed half way: both drafts must have the same bytes
* attention  the backends side by side, forward and backward (attention.py)
* steps      training steps of every method against their floor, memory against the estimate (gpu_steps.py)
* decode     decoding with a draft against plain decoding (gpu_decode.py)

torch and transformers are taken as they are; nothing is downloaded. A part that fails says so in its result. Kept in gpu.json,
with the card, the versions and the commit of each part.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS, WORK = ROOT / "benchmarks/results", ROOT / ".cache/benchmarks/gpu"
LIMIT = 540  # seconds of a part
DEMO, STAGE = "results/demo", "results/demo/sinkpi-slicing/base"
LIBRARIES = ("torch", "transformers", "deepspeed", "flash-attn", "liger-kernel", "triton")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}


def call(command: list[str], log: Path, limit: float = LIMIT) -> None:
    """Run a command with its output in a log. Raises RuntimeError with the log's end when it fails or takes too long."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if code:
        end = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {code}:\n{end}")


def tests(out: Path) -> dict[str, Any]:
    """Run the tests marked gpu and count them; failures with their last line."""
    report = WORK / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    try:
        call(command, out / "gpu_tests.log")
    except RuntimeError:
        if not report.is_file():
            raise
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))

    def of_kind(kind: str) -> dict[str, str]:
        found = {f"{case.get('classname')}::{case.get('name')}": case.find(kind) for case in cases}
        return {name: (part.get("message") or "").partition("\n")[0][:300] for name, part in found.items() if part is not None}

    failed, skipped = of_kind("failure") | of_kind("error"), of_kind("skipped")
    passed = len(cases) - len(failed) - len(skipped)
    return {"passed": passed, "failed": failed, "skipped": Counter(skipped.values())}


def demo(out: Path) -> dict[str, Any]:
    """Run the demo's graph; what the report says of it, and the seconds of its stages."""
    began = time.perf_counter()
    shutil.rmtree(ROOT / DEMO, ignore_errors=True)
    call(["snakemake", "final_draft", "--cores", "all"], out / "gpu_demo.log")
    found = json.loads((ROOT / DEMO / "report.json").read_text(encoding="utf-8"))
    stages = {}
    for path in sorted((ROOT / DEMO).glob("*/*/checkpoint.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        last = {key: rows[-1].get(key) for key in ("loss", "agreement", "tokens_per_second", "mfu", "peak_gpu_bytes")}
        stages[path.parent.name] = {"steps": content["step"], "seconds": content["training_seconds"], **last}
    return {"seconds": time.perf_counter() - began, "measured": found.get("measured"), "stages": stages}


def train(folder: Path, stop_after: int | None) -> tuple[int, str]:
    """Train the demo's first stage into a folder, killed once at a step where one is given.

    Returns the step at which it began to train to its end, and the SHA-256 of its draft.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / STAGE / "recipe.yaml", folder)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    runtime = yaml.safe_load((ROOT / STAGE / "runtime.yaml").read_text()) | {"extract_at_end": True}
    (folder / "runtime.yaml").write_text(yaml.safe_dump(runtime))
    data, name = recipe["data"], recipe["model"]["name"]
    packed = f"data/packed/{name}/{data['name']}-{data['collation']}-{data['sequence_length']}-{data['overlong']}/manifest.json"
    files = {"recipe": folder / "recipe.yaml", "runtime": folder / "runtime.yaml", "out": folder}
    files |= {"target": f"models/{name}/target_manifest.json", "data": packed}
    command = [sys.executable, "-m", "longspec.train", *(f"--{option}={path}" for option, path in files.items())]
    if stop_after is not None:
        kill_at(command, folder, stop_after)
    call(command, folder / "train.log")
    began = next(line for line in (folder / "train.log").read_text().splitlines() if "starting at step" in line)
    return int(began.rsplit(" ", 1)[1]), sha256((folder / "draft/model.safetensors").read_bytes()).hexdigest()


def kill_at(command: list[str], folder: Path, step: int) -> None:
    """Kill a training when it is so far. Raises RuntimeError with its log's end when it ends by itself, or takes too long."""
    status, end = folder / "status.json", time.monotonic() + LIMIT
    with (folder / "killed.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        while process.poll() is None and time.monotonic() < end:
            if status.is_file() and json.loads(status.read_text())["step"] >= step:
                break
            time.sleep(0.05)
        if process.poll() is not None or time.monotonic() >= end:
            process.kill()
            raise RuntimeError(f"it was not killed at step {step}:\n{(folder / 'killed.log').read_text()[-1500:]}")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def resume(_: Path) -> dict[str, Any]:
    """Compare a stage that was killed half way with one that was not, and with the demo's own."""
    (_, whole), (began, killed) = train(WORK / "whole", None), train(WORK / "killed", 200)
    if not began:
        raise RuntimeError("the killed stage began anew")
    own = sha256((ROOT / STAGE / "draft/model.safetensors").read_bytes()).hexdigest()
    return {"bit_equal": whole == killed, "resumed_at": began, "as_in_the_demo": whole == own, "sha256": whole}


def script(name: str, *options: str) -> Callable[[Path], dict[str, Any]]:
    """Return the part that another script measures, which keeps {name}.json itself."""

    def run(out: Path) -> dict[str, Any]:
        # A relative import of `tests` or of a neighbour is found by the script's own folder.
        call([sys.executable, f"benchmarks/{name}.py", "--out", str(out), *options], out / f"{name}.log")
        return {}

    return run


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tests": tests,
    "demo": demo,
    "resume": resume,
    "attention": script("attention", "--lengths", "1024", "8192", "32768"),
    "steps": script("gpu_steps"),
    "decode": script("gpu_decode"),
}


def about() -> dict[str, Any]:
    """Return the card, the versions and the commit."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "commit": git.stdout.strip() or os.environ.get("COMMIT"),
    }


def main() -> None:
    """Run the parts that are asked for, or those without a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: those without a result")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, help="no part begins later")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.exit("no GPU here: torch.cuda.is_available() is false")
    path, began = options.out / "gpu.json", time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.is_file() else {}
    machine = about()
    for name in options.parts or [each for each in PARTS if "failed_with" in kept.get(each, {"failed_with": ""})]:
        if options.minutes and time.perf_counter() - began > 60 * options.minutes:
            print(f"{name}: no time left", flush=True)
            continue
        clock = time.perf_counter()
        if name == "steps" and name in options.parts:
            (options.out / "gpu_steps.json").unlink(missing_ok=True)  # else it measures what is missing in it alone
        try:
            result = PARTS[name](options.out.resolve())
        except Exception as error:  # the other parts have their own reasons to work
            result = {"failed_with": str(error) or repr(error)}
        kept[name] = result | {"part_seconds": round(time.perf_counter() - clock, 1), **machine}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {json.dumps(result)[:1500]} ({kept[name]['part_seconds']} s)", flush=True)


if __name__ == "__main__":
    main()
