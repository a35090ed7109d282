"""Where a draft comes from: code, versions, hashes. No torch: the final folder is put together on login nodes too."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, sha256_file


def git_commit() -> str:
    """The commit the code stands at, marked when it has uncommitted changes; 'unknown' outside a clone."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() or "unknown"


def published(choice: Path, stage_folders: list[Path]) -> tuple[Path, list[Path]]:
    """The draft folder of the stage that a choice names, and the stages that have trained it, in order.

    Raises ValueError, with file and key, for a stage that is none of them.
    """
    stage, names = read_json(choice)["stage"], [folder.name for folder in stage_folders]
    if stage not in names:
        raise ValueError(f"{choice}: stage: {stage!r} is none of {', '.join(names)}; make it again (rule choose_final_stage)")
    trained_by = stage_folders[: names.index(stage) + 1]
    return trained_by[-1] / "draft", trained_by


def provenance(folders: Mapping[str, Path], stage: str, target: Path, tokenizer: Path, data: list[Path]) -> dict[str, Any]:
    """provenance.json: code, versions, hashes of everything that went in, and how each stage was trained.

    folders: of the stages by their names, in order; stage: the published one, whose training had these versions.
    """
    checkpoints = {name: read_json(folder / "checkpoint.json") for name, folder in folders.items()}
    return {
        "git_commit": git_commit(),
        "versions": checkpoints[stage]["versions"],
        "recipes": {name: sha256_file(folder / "recipe.yaml") for name, folder in folders.items()},
        "data": {str(path): sha256_file(path) for path in data},
        "target": {str(target): sha256_file(target)},
        "tokenizer": {str(tokenizer): sha256_file(tokenizer)},
        "order": list(folders),
        "stages": {
            name: {key: checkpoint[key] for key in ("step", "world_size", "zero_stage", "training_seconds", "tokens_seen")}
            for name, checkpoint in checkpoints.items()
        },
    }
