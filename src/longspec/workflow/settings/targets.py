"""Check what is known of targets and drafts to begin with before any job runs: whether they exist, and their family."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.atomic_files import read_json
from longspec.config.checks import BUILT, SOURCES
from longspec.config.faults import faults_in
from longspec.config.names import HUB_PREFIX, WHEEL_PREFIX, is_gguf, is_name
from longspec.config.run_file import Run
from longspec.config.target_facts import NotKnownError, facts_of, kept_beside, sizes_in
from longspec.families import check_content
from longspec.methods.draft_files import METHOD
from longspec.workflow.choices import Choices
from longspec.workflow.paths import TARGET

WEIGHTS = (".pth", ".bin", ".safetensors")  # suffixes of files with a draft's weights alone


def may_be_source(target: str) -> bool:
    """Tell whether a text can be a target's source; a bare name must be a folder that exists here."""
    return not is_name(target) or is_gguf(target) or Path(target).is_dir()


def learn(run: Run, target: str) -> None:
    """Read what must be known of a run's target, if not known yet, and keep it next to the run's file.

    Raises ValueError, with what to write in the file, if it cannot be read.
    """
    if run.says.recipe.get("model", {}).get("family"):
        return
    with suppress(NotKnownError):
        facts_of(target, run.path)
        return
    command = [sys.executable, "-m", "longspec.target", "facts", "--source", target, "--out", str(kept_beside(run.path))]
    asks = os.environ.get("FETCH_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))  # jobs never ask the hub; this is no job
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": asks})
    if done.returncode:
        said = (done.stderr.strip() or "it says nothing").splitlines()[-1].removeprefix("error: ")
        raise ValueError(f"target: {target}: {said}")


def config_of(model: Any) -> Path:
    """Return the path of a target's config.json: in its own folder, or in the one that a job fetches or makes."""
    if not (model.source.startswith(HUB_PREFIX) or is_gguf(model.source)):
        return Path(model.source).expanduser() / "config.json"
    manifest, folder = Path(TARGET.format(model=model.name)), "target"
    with suppress(OSError, ValueError, KeyError):  # not here yet, or damaged: its job will find that
        folder = "target" if read_json(manifest)["source"] == model.source else "target-to-come"  # it is made anew
    return manifest.with_name(folder) / "config.json"


def check_target(key: str, recipe: Any) -> None:
    """Raise ValueError if a folder holds no target, or one of another family than the recipe's.

    key: of the run's model, such as "run 'demo', stage 'base': recipe.model".
    """
    source = recipe.model.source
    if source == BUILT:
        return
    config = config_of(recipe.model)
    if config.is_file():
        content = read_json(config)
        check_content(content, config)
        with faults_in(key):
            methods.check_family_named(recipe, content["model_type"], str(config.parent))
    elif is_gguf(source):  # once the target is made, its file is not needed
        if not source.startswith(WHEEL_PREFIX) and not Path(source).expanduser().is_file():
            raise ValueError(f"{key}.source: {source}: no such file (seen from {Path.cwd()}); give {SOURCES}")
    elif not source.startswith(HUB_PREFIX):
        raise ValueError(
            f"{key}.source: {source}: {'has no config.json' if config.parent.is_dir() else 'no such folder'} (seen from "
            f"{Path.cwd()}); give {SOURCES}"
        )


def sizes_of(config: Any) -> tuple[int | None, int | None, int | None]:
    """Return layers, tokens and positions of a stage's target, each None if only the job that loads the weights can tell."""
    if config.recipe.model.source == BUILT:
        return config.build.layers, config.build.vocabulary, config.build.max_position
    path = config_of(config.recipe.model)
    content = read_json(path) if path.is_file() else {}
    layers, tokens, positions = sizes_in(content)
    # families.position_limit knows how far yarn stretches, but needs transformers' object.
    is_stretched = "yarn" in json.dumps(content.get("rope_scaling") or content.get("rope_parameters"))
    return layers, tokens, None if is_stretched else positions


# Drafts made elsewhere, which runs begin with.


def local_files(source: str) -> list[str]:
    """Return the files on this machine that decide what a draft is; [] for one of the hub."""
    folder = Path(source).expanduser()
    if folder.is_file():
        return [str(folder)]
    patterns = ("config.json", "*.index.json", "*.safetensors", "pytorch_model*.bin")
    return sorted(str(path) for pattern in patterns for path in folder.glob(pattern))


def check_beginnings(choices: Choices) -> None:
    """Raise ValueError, with the key, if a draft to begin with does not exist or conflicts with vocabulary_from."""
    for run in choices.files:
        for variant in choices.variants[run]:
            recipe = choices.first_recipe(run, variant)
            key, source = f"run '{run}', variant '{variant}': recipe.init", recipe.init
            if source is not None and methods.vocabulary_lender(recipe) is not None:
                raise ValueError(
                    f"{key}: {source} brings its own tokens, recipe.method.vocabulary_from takes another run's; set that "
                    "to null"
                )
            if source is not None and not source.startswith(HUB_PREFIX):
                _check_local(f"{key}: {source}", Path(source).expanduser(), recipe.method.name)


def _check_local(key: str, folder: Path, method: str) -> None:
    """Check a folder on this machine: its files, and its draft's method; the import checks the rest. Raises ValueError."""
    if folder.is_file():
        if folder.suffix not in WEIGHTS or method != methods.method_of_file():
            raise ValueError(
                f"{key}: is a file: give one of {', '.join(WEIGHTS)} of a {methods.method_of_file()} draft "
                f"(recipe.method.name is {method}), or a draft's folder with its config.json"
            )
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{key}: {'has no config.json' if folder.is_dir() else 'no such folder'} (seen from {Path.cwd()}); give "
            f"{HUB_PREFIX}<owner>/<repository>[@revision] or the folder of a draft"
        )
    config = read_json(folder / "config.json")
    found = config.get(METHOD) or methods.published_method(config)
    if found != method:
        told = f"is a draft of {found}" if found else f"architectures: {config.get('architectures')!r}: no draft that is known"
        raise ValueError(f"{key}: {told}, recipe.method.name is {method}; give a draft of this method, or change it")
