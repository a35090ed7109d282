"""Facts about a target that are known before any job runs: whether its folder is there, its family, its size."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from longspec import methods
from longspec.atomic_files import read_json
from longspec.config.checks import BUILT, SOURCES
from longspec.config.faults import faults_in
from longspec.config.names import HUB_PREFIX, WHEEL_PREFIX, is_gguf, is_name
from longspec.config.run_file import Run
from longspec.config.target_facts import NotKnownError, facts_of, kept_beside
from longspec.families import OF_GGUF, check_family, check_not_quantized

GGUF_MAGIC = b"GGUF"


def may_be_source(target: str) -> bool:
    """Tell whether a text can say where a target comes from: a bare name is only that of a folder that is here."""
    return not is_name(target) or is_gguf(target) or Path(target).is_dir()


def learn(run: Run, target: str) -> None:
    """Have what must be known of a run's target read once, and kept beside the run's file.

    Raises ValueError, with the run's file and what to type in it, where it cannot be read.
    """
    if run.says.recipe.get("model", {}).get("family"):
        return
    try:
        with faults_in(run.file):
            facts_of(target, run.path)
    except ValueError as error:
        if not isinstance(error.__cause__, NotKnownError):
            raise
    else:
        return
    command = [sys.executable, "-m", "longspec.target", "facts", "--source", target, "--out", str(kept_beside(run.path))]
    asks = os.environ.get("FETCH_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))  # jobs ask no hub; this is no job
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": asks})
    if done.returncode:
        said = (done.stderr.strip() or "it says nothing").splitlines()[-1].removeprefix("error: ")
        raise ValueError(f"{run.file}: target: {target}: {said}")


def folder_of(source: str, fetched: Path) -> Path | None:
    """Where a target's config.json is looked for; None for one that is built.

    fetched: the place of one from the hub, and of one that a job makes of a GGUF file.
    """
    if source == BUILT:
        return None
    return fetched if source.startswith(HUB_PREFIX) or is_gguf(source) else Path(source).expanduser()


def check_target(key: str, recipe: Any, fetched: Path) -> None:
    """Raise ValueError for a folder that holds no target, and for another family than the target's.

    key: of the run's model, such as "run 'demo', stage 'base': recipe.model"; fetched: as of folder_of.
    """
    model = recipe.model
    folder = folder_of(model.source, fetched)
    if folder is None:
        return
    config = settings_of(folder)
    if config is None:  # a target that has been made needs its file no more
        _check_gguf(key, recipe)
    if config is None and folder == fetched:
        return  # not there yet
    if config is None:
        raise ValueError(
            f"{key}.source: {model.source}: {'has no config.json' if folder.is_dir() else 'no such folder'} (seen from "
            f"{Path.cwd()}); give {SOURCES}"
        )
    check_family(config.get("model_type"), folder / "config.json")
    check_not_quantized(config, folder / "config.json")
    with faults_in(key):
        methods.check_family_named(recipe, config["model_type"], str(folder))


def _check_gguf(key: str, recipe: Any) -> None:
    """Hold a GGUF file of this machine against its first bytes and the run's family; its job reads the rest."""
    source = recipe.model.source
    if not is_gguf(source) or source.startswith(WHEEL_PREFIX):
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"{key}.source: {source}: no such file (seen from {Path.cwd()}); give {SOURCES}")
    with path.open("rb") as handle:
        if handle.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError(f"{key}.source: {source}: does not begin with {GGUF_MAGIC.decode()}; copy or download it again")
        architecture = _architecture(handle)
    family = OF_GGUF.get(architecture or "")
    if family:
        with faults_in(key):
            methods.check_family_named(recipe, family, f"{source} (general.architecture {architecture})")


def _architecture(handle: BinaryIO) -> str | None:
    """Read general.architecture behind a GGUF file's magic, where writers put it; None for a cut file or another key."""
    handle.read(20)  # version, and how many tensors and keys
    found = []
    for before in (0, 4):  # a text's type stands between key and value
        size = handle.read(before + 8)[before:]
        length = int.from_bytes(size, "little")
        found.append(handle.read(length) if length < 64 else b"")
    return found[1].decode("ascii", "replace") if found[0] == b"general.architecture" else None


def settings_of(folder: Path) -> dict[str, Any] | None:
    """A target's own configuration; None where there is none. Raises ValueError for a file that is no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a JSON object; get the target again")
    return config


def positions_of(source: str, built: int, fetched: Path) -> int | None:
    """How many positions a target has; None where only its weights' job can tell. `built`: those of one that is built here."""
    folder = folder_of(source, fetched)
    if folder is None:
        return built
    config = settings_of(folder) or {}
    scaled = config.get("rope_scaling") or config.get("rope_parameters")
    told = config.get("max_position_embeddings")
    stretched = "yarn" in json.dumps(scaled)  # how far: families.position_limit, which needs transformers' object
    return told if isinstance(told, int) and not stretched else None


def size_of(source: str, build: Any, fetched: Path) -> tuple[int, int] | None:
    """Layers and tokens of a target; None where only its weights' job can tell. `build`: the section of one built here."""
    folder = folder_of(source, fetched)
    if folder is None:
        return build.layers, build.vocabulary
    config = settings_of(folder) or {}
    layers, tokens = config.get("num_hidden_layers"), config.get("vocab_size")
    return (layers, tokens) if isinstance(layers, int) and isinstance(tokens, int) else None


def check_length(key: str, length: int, positions: int) -> None:
    """Raise ValueError for rows in which a document could be longer than the target reads."""
    if length > positions:
        raise ValueError(
            f"{key}.data.sequence_length: {length} tokens are more than the target's {positions} positions; lower it"
        )
