"""What a person is told before states are built: disk, hours, and from how many epochs on they pay.

Estimated by `python -m longspec.train plan` in a process of its own: torch stays out of the one that controls the jobs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from longspec.config import to_yaml
from longspec.workflow import paths
from longspec.workflow.jobs.resources import Limits
from longspec.workflow.states import Folder, StatesPlan

PLAN = [sys.executable, "-m", "longspec.train", "plan"]
CORE = 0.05e12  # operations a second of a core with AVX-512 in float32; without a profile a machine's cores build


def lines(states: StatesPlan, limits: Limits) -> list[str]:
    """Some lines for each folder of states that is not built and that a stage is still to be trained on."""
    told: list[str] = []
    for names, stages in states.readers.items():
        folder = Path(paths.STATES.format(model=names[0], rows=names[1], declaration=names[2]))
        trained = [Path(paths.stage_folder(*stage)) for stage in stages]
        if (folder / "contents.json").is_file() or all((stage / "checkpoint.json").is_file() for stage in trained):
            continue
        shared = f", read by {len(stages)} stages" if len(stages) > 1 else ""
        told += [f"states to be stored in {folder}{shared}:", *_figures(states, names, limits)]
    return told


def _figures(states: StatesPlan, names: Folder, limits: Limits) -> list[str]:
    needed = [paths.TARGET.format(model=names[0]), f"data/packed/{names[0]}/{names[1]}/manifest.json"]
    missing = [path for path in needed if not Path(path).is_file()]
    if missing:
        return [f"  disk and hours can be told when {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} there"]
    config = states.config_of(names)
    rate = limits.nodes * limits.ranks * limits.tflops * 1e12 or CORE * (os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        command = [*PLAN, "--states-only", "--target", needed[0], "--data", needed[1], "--ranks", "1"]
        command += ["--flops", str(rate), "--states-folder", str(states.disk)]
        for section in ("recipe", "runtime"):
            Path(folder, section).write_text(to_yaml(config[section]))
            command += [f"--{section}", f"{folder}/{section}"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        return [f"  an estimate failed: {said}"]
    return done.stdout.splitlines()[1:]
