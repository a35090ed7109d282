"""Where stored states lie: data/states, or the folder of config/workflow.yaml that it is a link to."""

from pathlib import Path
from typing import Any

from longspec.atomic_files import fsync_path

ROOT = Path("data/states")
PLACE = "states_folder"  # of config/workflow.yaml


class StatesPlace:
    """The place of all stored states. readers: who reads each folder of them; without any nothing is placed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.readers: dict[Any, list[Any]] = {}

    @property
    def _configured(self) -> Path | None:
        configured = self.settings.get(PLACE)
        return None if configured is None or not self.readers else Path(configured).expanduser().absolute()

    @property
    def disk(self) -> Path:
        """The folder on whose disk states are stored, or the first one above it that is there."""
        wanted = (self._configured or ROOT).resolve()
        return next(path for path in (wanted, *wanted.parents) if path.is_dir())

    def check_place(self) -> None:
        """Raise ValueError where data/states cannot become a link to the configured folder, since it is something else."""
        configured = self._configured
        if configured is None or (not ROOT.is_symlink() and not ROOT.exists()) or ROOT.resolve() == configured.resolve():
            return
        is_link = ROOT.is_symlink()
        there = f"a link to {ROOT.readlink()}" if is_link else "a folder"
        fix = f"rm {ROOT}" if is_link else f"mv {ROOT}/* {configured}/ && rmdir {ROOT}, or rm -r {ROOT}"
        raise ValueError(f"config/workflow.yaml: {PLACE}: {configured}: {ROOT} is {there} already; change that first: {fix}")

    def make_place(self) -> None:
        """Make data/states a link to the configured folder: paths, which Snakemake records, stay when the disk changes."""
        configured = self._configured
        if configured is None or ROOT.is_symlink():
            return
        configured.mkdir(parents=True, exist_ok=True)
        ROOT.parent.mkdir(parents=True, exist_ok=True)
        ROOT.symlink_to(configured)
        fsync_path(ROOT.parent)
