"""The lines printed before states are built: their disk space, their hours, and what they save."""

import os
from pathlib import Path

from longspec.workflow import paths
from longspec.workflow.jobs.resources import Limits, estimated
from longspec.workflow.states import Folder, StatesPlan

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
    rate = limits.nodes * limits.ranks * limits.tflops * 1e12 or CORE * (os.cpu_count() or 1)
    options = ["--states-only", "--ranks", 1, "--flops", rate, "--states-folder", states.disk]
    done = estimated(states.config_of(names), needed[0], needed[1], *options)
    if done.returncode:
        said = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        return [f"  an estimate failed: {said}"]
    return done.stdout.splitlines()[1:]
