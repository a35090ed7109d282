"""A copy of the workflow in which a benchmark trains runs of its own: those of the checkout stay as they are."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import ROOT

EXPERIMENTS = ROOT / "benchmarks/config"  # runs and variants of the benchmarks' own
CODE = ("Snakefile", "rules", "config", "profiles", "src")


@dataclass(frozen=True)
class WorkflowCopy:
    """The folder it lies in; what has been trained there stays."""

    folder: Path

    def refresh(self) -> None:
        """Take over the code and the configuration as they are now; runs that were added are gone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in CODE:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            shutil.rmtree(self.folder / part, ignore_errors=True)
            copy(ROOT / part, self.folder / part)
        shutil.copytree(EXPERIMENTS, self.folder / "config", dirs_exist_ok=True)

    def take(self, parts: Sequence[str]) -> None:
        """Copy folders that jobs have made in the checkout, each once, with their times, by which Snakemake knows them."""
        for part in parts:
            if (ROOT / part).is_dir() and not (self.folder / part).exists():
                shutil.copytree(ROOT / part, self.folder / "half", dirs_exist_ok=True)
                (self.folder / part).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / "half").rename(self.folder / part)

    def add_run(self, name: str, run: str, values: Mapping[str, Mapping[str, Any]]) -> str:
        """Write a run of the first stages of another; its name.

        values: of each of these stages by section, recipe or runtime, what is set in it.
        """
        path = self.folder / f"config/run/{name}.yaml"
        path.write_text(yaml.safe_dump({"base": run, "stages": dict(values)}, sort_keys=False))
        return name

    def make(self, *arguments: str) -> None:
        """Call Snakemake there. Raises subprocess.CalledProcessError where it fails."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src")}
        for more in (["--unlock"], []):  # a killed Snakemake leaves its lock
            subprocess.run(["snakemake", *arguments, *more], cwd=self.folder, env=environment, check=True)
