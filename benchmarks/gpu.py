"""All that only a GPU can show, in parts of at most nine minutes, and one page of it: make gpu

    python benchmarks/gpu.py                    every part that is not done
    python benchmarks/gpu.py steps demo         these parts; one that is done begins again
    python benchmarks/gpu.py --minutes 9        ends after so many minutes, in the midst of a part too
    python benchmarks/gpu.py --tiny --out DIR   toy shapes on any machine, to prove that it works

* tests      the tests marked `gpu`, test by test (gpu_tests.py)
* attention  the backends side by side, forward and backward (attention.py)
* steps      training steps of every method against their floor, memory against the estimate (gpu_steps.py)
* decode     decoding with a draft of every method against plain decoding (gpu_decode.py)
* demo       the embedded default's run, trained and measured on the GPU, in a copy of the workflow
* resume     the demo's first stage once as it is and once killed half way: both drafts must have the same bytes

A part that was stopped or killed goes on where it was when the same command runs again. A part that fails says so and stops no
other. Nothing is downloaded: torch and transformers are taken as they are, and a part whose packages are missing names them and
is skipped. Packages in .gpu/ are found (gpu_packages.py). Kept in gpu.json, with the card, the versions
and the commit of each part; the page is gpu.html.
"""

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu_parts import PACKAGES, PARTS, ROOT, Parts, StoppedError

sys.path[1:1] = [str(ROOT / "src"), str(PACKAGES)]

LIMIT = 500  # seconds of a part
LIBRARIES = ("torch", "transformers", "deepspeed", "flash-attn", "triton")
READING = ("yaml", "jsonlines", "omegaconf", "hydra", "pydantic", "rich", "scipy", "matplotlib", "jinja2")
TRAINING = (*READING, "snakemake", "deepspeed", "datasets", "tokenizers", "safetensors", "pyarrow")
NEEDED = {"tests": ("pytest", "hypothesis", *READING), "demo": TRAINING, "resume": TRAINING}
# What torch 2.11 lacks of 2.13, and what stands in its place: in the copy that all parts run, and named in each part's result.
LACKING = {
    "torchrun --shutdown-timeout": ("cluster/launch.py", ', f"--shutdown-timeout={PATIENCE}"', ""),
    "torch.compile(recompile_limit)": ("models/attention/flex.py", ", recompile_limit=SHAPES", ""),
}


def about() -> dict[str, Any]:
    """Return the card, the versions and the commit."""
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = None
            versions[name] = torch.__version__ if name == "torch" else version(name)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "versions": versions, "commit": git.stdout.strip() or os.environ.get("COMMIT")}


def lacking() -> list[str]:
    """Return what this torch lacks."""
    from torch.distributed.run import get_args_parser

    lacks = {
        "torchrun --shutdown-timeout": "--shutdown-timeout" not in get_args_parser().format_help(),
        "torch.compile(recompile_limit)": "recompile_limit" not in inspect.signature(torch.compile).parameters,
    }
    return [name for name in LACKING if lacks[name]]


def copy_code(parts: Parts, lacks: list[str]) -> None:
    """Make the copy whose code runs, without what this torch lacks; the demo's target and data are taken if they are there."""
    from benchmarks.workflow_copy import WorkflowCopy

    copy = WorkflowCopy(parts.copy)
    copy.refresh()
    copy.take(("models/demo", "data"))
    for name, old, new in (LACKING[each] for each in lacks):
        path = parts.copy / "src/longspec" / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{path} has changed: mend LACKING"
        path.write_text(text.replace(old, new), encoding="utf-8")


def forget(left: Path, device: str) -> None:
    """Remove what a part kept; of lines those of this card."""
    if left.is_dir():
        shutil.rmtree(left)
    elif left.is_file():
        lines = left.read_text(encoding="utf-8").splitlines(keepends=True)
        left.write_text("".join(line for line in lines if json.loads(line).get("device", device) != device), encoding="utf-8")


def run(name: str, parts: Parts) -> dict[str, Any]:
    """Return the result of a part: one with failed_with, missing or unfinished is none, and is asked for again."""
    missing = [module for module in NEEDED.get(name, READING) if find_spec(module) is None]
    if missing:
        return {"missing": missing}
    try:
        return PARTS[name][0](parts)
    except StoppedError:
        return {"unfinished": "its time was over; the same command goes on"}
    except Exception as error:  # the other parts have their own reasons to work
        return {"failed_with": str(error) or repr(error)}


def is_done(result: dict[str, Any]) -> bool:
    """Whether a part has a result."""
    return bool(result) and not result.keys() & {"failed_with", "missing", "unfinished"}


def main() -> None:
    """Run the parts that are asked for, or those without a result, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: those that are not done")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of the whole command; default: no end")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, on a CPU too")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose of {', '.join(PARTS)}")
    if options.tiny and options.out is None:
        parser.error("--tiny: give --out FOLDER, whose results are no measurements")
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no GPU here: torch.cuda.is_available() is false. --tiny --out FOLDER proves on any machine that this works")
    out = (options.out or ROOT / "benchmarks/results").resolve()
    work = out / "work" if options.tiny else ROOT / ".cache/benchmarks/gpu"
    out.mkdir(parents=True, exist_ok=True)
    path, end_of_all = out / "gpu.json", time.monotonic() + 60 * options.minutes
    kept = json.loads(path.read_text()) if path.is_file() else {}
    machine = about() | {"left_out": lacking()}
    copy_code(Parts(out, work, options.tiny), machine["left_out"])
    for name in options.parts or [each for each in PARTS if not is_done(kept.get(each, {}))]:
        began = time.monotonic()
        if began >= end_of_all:
            print(f"{name}: no time left", flush=True)
            continue
        before = kept.pop(name, {})
        if is_done(before):
            before = {}
            for left in PARTS[name][1]:
                forget(out / left, machine["device"])
                forget(work / left, machine["device"])
        kept[name] = {"unfinished": "it was killed; the same command goes on", **before}
        write(path, kept)
        result = run(name, Parts(out, work, options.tiny, min(began + LIMIT, end_of_all)))
        seconds = round(before.get("part_seconds", 0) + time.monotonic() - began, 1)
        kept[name] = result | {"part_seconds": seconds, **machine}
        write(path, kept)
        print(f"{name}: {json.dumps(result)[:1500]} ({seconds} s)", flush=True)


def write(path: Path, kept: dict[str, Any]) -> None:
    """Write the results and the page, which names its missing packages where it cannot be made here."""
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    try:
        from benchmarks.gpu_page import page
    except ModuleNotFoundError as error:
        print(f"the page is not made here: {error}; elsewhere: python benchmarks/gpu_page.py {path.parent}", flush=True)
    else:
        page(path.parent)


if __name__ == "__main__":
    main()
