"""Origin of a draft that this project trained: its recipe, the folder of its stage, its target; code, versions and hashes.

No torch: the final folder is put together on login nodes too.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from longspec.atomic_files import read_json, read_json_object, sha256_file, write_text
from longspec.config import Recipe, differences, load, plain, typed, yaml_files
from longspec.draft_vocabulary import DraftVocabulary
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, read_manifest

CHECKPOINT, RUNTIME = "checkpoint.json", "runtime.yaml"  # in a stage's folder


def read_checkpoint(checkpoint: Path) -> tuple[dict[str, Any], Path]:
    """Read a stage's checkpoint.json or a slot's manifest: its content, and the stage's folder; no content of other sources."""
    if checkpoint.name == CHECKPOINT:
        return read_json_object(checkpoint), checkpoint.absolute().parent
    if (checkpoint / MANIFEST).is_file():
        return read_manifest(checkpoint), checkpoint.absolute().parents[1]
    return {}, Path()


def recipe_and_folder(checkpoint: Path, recipe_path: Path | None, out: Path | None) -> tuple[Any, Path]:
    """Find the recipe of a checkpoint's draft and where the draft goes; both may be given.

    Raises ValueError when they are neither given nor known, and for another recipe than the checkpoint was trained by.
    """
    found, stage = read_checkpoint(checkpoint)
    if "identity" not in found:
        if recipe_path is None or out is None:
            raise ValueError(f"{checkpoint}: says nothing of its recipe and its stage; give --recipe and --out")
        return load(recipe_path, Recipe), out
    own = typed(found["identity"]["recipe"], Recipe, checkpoint)
    recipe = own if recipe_path is None else load(recipe_path, Recipe)
    if changed := differences(plain(own), plain(recipe)):
        raise ValueError(f"{recipe_path}: is not what {checkpoint} was trained by: {'; '.join(changed)}")
    return recipe, out or stage / ("draft" if checkpoint.name == CHECKPOINT else f"draft-{checkpoint.name}")


def runtime_of(checkpoint: Path) -> dict[str, Any]:
    """Return the section `runtime` that a checkpoint was trained with; empty where none is known.

    The last job of a finished stage has noted its own; of one that is not finished runtime.yaml is read.
    """
    content, stage = read_checkpoint(checkpoint)
    if "runtime" in content:
        return {"runtime": content["runtime"]}
    if "identity" in content and (stage / RUNTIME).is_file():
        return {"runtime": yaml_files.read(stage / RUNTIME)}
    return {}


def write_training_config(folder: Path, training: dict[str, Any]) -> None:
    """Write training_config.yaml of a draft folder: by stage the sections `recipe` and `runtime`."""
    write_text(folder / "training_config.yaml", yaml.safe_dump(training, sort_keys=True))


def check_vocabulary(checkpoint: Path, path: Path | None, vocabulary: DraftVocabulary | None) -> None:
    """Raise ValueError for another draft vocabulary than a checkpoint of ours was trained with."""
    identity = read_checkpoint(checkpoint)[0].get("identity")
    if identity is not None and vocabulary is not None and identity.get("vocabulary") != vocabulary.hash:
        raise ValueError(
            f"{path}: ids: are not those that {checkpoint} was trained with, so that its head would say other tokens; give the "
            "file that its stage was trained with"
        )


def git_commit() -> str:
    """Return the commit the code stands at, marked when it has uncommitted changes; 'unknown' outside a clone."""
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
    """Return the draft folder of the stage that a choice names, and the stages that have trained it, in order.

    Raises ValueError, with file and key, for a stage that is none of them.
    """
    stage, names = read_json(choice)["stage"], [folder.name for folder in stage_folders]
    if stage not in names:
        raise ValueError(f"{choice}: stage: {stage!r} is none of {', '.join(names)}; make it again (rule choose_final_stage)")
    trained_by = stage_folders[: names.index(stage) + 1]
    return trained_by[-1] / "draft", trained_by


def provenance(folders: Mapping[str, Path], stage: str, target: Path, tokenizer: Path, data: list[Path]) -> dict[str, Any]:
    """Return provenance.json: code, versions, hashes of everything that went in, and how each stage was trained.

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
