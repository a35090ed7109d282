"""Snakemake in a fork of a process that has imported it: half of a plan's time, and a hundred plans are made."""

import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

PATIENCE = 300  # seconds
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["snakemake.cli", "snakemake.storage", "snakemake.report.html_reporter", "smart_open", "hydra", "jsonlines"]
)


def snakemake(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """What `snakemake ARGUMENTS` in the folder prints and returns; the folder's src/ comes before what is installed."""
    with tempfile.TemporaryDirectory() as scratch:
        printed = [Path(scratch, name) for name in ("stdout", "stderr")]
        child = SERVER.Process(target=_main, args=(list(arguments), folder, dict(environment), printed))  # type: ignore[attr-defined]
        child.start()
        child.join(PATIENCE)
        if child.is_alive():
            child.kill()
            child.join()
            told = "\n".join(path.read_text() for path in printed if path.exists())
            raise AssertionError(f"snakemake {' '.join(arguments)} hangs; so far:\n{told}")
        return CompletedProcess(arguments, child.exitcode, *(path.read_text() for path in printed))


def _main(arguments: list[str], folder: Path, environment: dict[str, str], printed: list[Path]) -> None:
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(folder / "src"))
    sys.argv = ["snakemake", *arguments]
    if "slurm" in arguments:
        importlib.import_module("tests.slurm.impatient")
    from snakemake.cli import main
    from snakemake.executors import touch

    touch.Executor.SLEEPING_TIME = 0.01  # for each file's age: a kernel's clock ticks every 4 ms at least
    main()
