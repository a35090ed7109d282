"""Facts about a target that are known before any job runs: whether its folder is there, its family, its size."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.atomic_files import read_json_object
from longspec.config.checks import BUILT, SOURCES
from longspec.config.faults import faults_in
from longspec.config.names import HUB_PREFIX, WHEEL_PREFIX, is_gguf, is_name
from longspec.config.run_file import Run
from longspec.config.target_facts import NotKnownError, facts_of, kept_beside, sizes_in
from longspec.families import check_family, check_not_quantized


def may_be_source(target: str) -> bool:
    """Tell whether a text can say where a target comes from: a bare name is only that of a folder that is here."""
    return not is_name(target) or is_gguf(target) or Path(target).is_dir()


def learn(run: Run, target: str) -> None:
    """Have what must be known of a run's target read once, and kept beside the run's file.

    Raises ValueError, with what to type in the file, where it cannot be read.
    """
    if run.says.recipe.get("model", {}).get("family"):
        return
    with suppress(NotKnownError):
        facts_of(target, run.path)
        return
    command = [sys.executable, "-m", "longspec.target", "facts", "--source", target, "--out", str(kept_beside(run.path))]
    asks = os.environ.get("FETCH_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))  # jobs ask no hub; this is no job
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": asks})
    if done.returncode:
        said = (done.stderr.strip() or "it says nothing").splitlines()[-1].removeprefix("error: ")
        raise ValueError(f"target: {target}: {said}")


def folder_of(source: str, fetched: Path) -> Path:
    """Return where a target's config.json is looked for. fetched: the place of one that a job fetches or makes."""
    made = source == BUILT or source.startswith(HUB_PREFIX) or is_gguf(source)
    return fetched if made else Path(source).expanduser()


def settings_of(folder: Path) -> dict[str, Any] | None:
    """Return a target's own configuration; None where there is none. Raises ValueError for a file that is no JSON object."""
    path = folder / "config.json"
    return read_json_object(path) if path.is_file() else None


def check_target(key: str, recipe: Any, fetched: Path) -> None:
    """Raise ValueError for a folder that holds no target, and for another family than the target's.

    key: of the run's model, such as "run 'demo', stage 'base': recipe.model"; fetched: as of folder_of.
    """
    source = recipe.model.source
    if source == BUILT:
        return
    folder = folder_of(source, fetched)
    config = settings_of(folder)
    if config is not None:
        check_family(config.get("model_type"), folder / "config.json")
        check_not_quantized(config, folder / "config.json")
        with faults_in(key):
            methods.check_family_named(recipe, config["model_type"], str(folder))
    elif is_gguf(source) and not source.startswith(WHEEL_PREFIX):  # a target that has been made needs its file no more
        if not Path(source).expanduser().is_file():
            raise ValueError(f"{key}.source: {source}: no such file (seen from {Path.cwd()}); give {SOURCES}")
    elif folder != fetched:
        raise ValueError(
            f"{key}.source: {source}: {'has no config.json' if folder.is_dir() else 'no such folder'} (seen from "
            f"{Path.cwd()}); give {SOURCES}"
        )


def sizes_of(source: str, build: Any, fetched: Path) -> tuple[int | None, int | None, int | None]:
    """Return layers, tokens and positions of a target, each None where only its weights' job can tell.

    build: the section of one that is built here; fetched: as of folder_of.
    """
    if source == BUILT:
        return build.layers, build.vocabulary, build.max_position
    config = settings_of(folder_of(source, fetched)) or {}
    layers, tokens, positions = sizes_in(config)
    # How far yarn stretches: families.position_limit, which needs transformers' object.
    is_stretched = "yarn" in json.dumps(config.get("rope_scaling") or config.get("rope_parameters"))
    return layers, tokens, None if is_stretched else positions
