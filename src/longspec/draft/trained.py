"""Describe how this project trained a draft: its recipe, its stage's folder, its target; code, versions and hashes.

No torch: login nodes, too, put the final folder together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from longspec.atomic_files import read_json, sha256_file, write_text
from longspec.config import Recipe, typed, yaml_files
from longspec.draft_vocabulary import DraftVocabulary
from longspec.train.checkpoint.checkpoint_dir import MANIFEST

CHECKPOINT = "checkpoint.json"  # in a stage's folder


class Checkpoint:
    """Read a stage's checkpoint.json. stage: the stage's folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.stage, self._content = path, path.absolute().parent, read_json(path)

    @property
    def slot(self) -> Path:
        """Return the slot with the weights. Raises ValueError if the slot now holds another checkpoint."""
        slot = self.stage / self._content["slot"]
        if sha256_file(slot / MANIFEST) != self._content["manifest_sha256"]:
            raise ValueError(f"{slot}: is not the checkpoint that {self.path} names; train the stage again")
        return slot

    @property
    def recipe(self) -> Any:
        """Return the recipe of the training."""
        return typed(self._content["identity"]["recipe"], Recipe, self.path)

    @property
    def runtime(self) -> dict[str, Any]:
        """Return {"runtime": section of the stage's last job}; from runtime.yaml if the checkpoint does not hold it."""
        return {"runtime": self._content.get("runtime") or yaml_files.read(self.stage / "runtime.yaml")}

    def check_vocabulary(self, path: Path | None, vocabulary: DraftVocabulary | None) -> None:
        """Raise ValueError if the draft vocabulary is not the one of the training."""
        if vocabulary is not None and self._content["identity"].get("vocabulary") != vocabulary.hash:
            raise ValueError(f"{path}: ids: are not those that {self.path} was trained with; give the file of its stage")


def write_training_config(folder: Path, training: dict[str, Any]) -> None:
    """Write training_config.yaml of a draft folder. training: for each stage the sections `recipe` and `runtime`."""
    write_text(folder / "training_config.yaml", yaml.safe_dump(training, sort_keys=True))


def provenance(folders: Mapping[str, Path], stage: str, target: Path, tokenizer: Path, data: list[Path]) -> dict[str, Any]:
    """Return provenance.json: code, versions, hashes of all inputs, and how each stage was trained.

    folders: stages by name, in order; stage: the published one, which this code and these versions trained.
    """
    checkpoints = {name: read_json(folder / CHECKPOINT) for name, folder in folders.items()}
    begun = next(iter(checkpoints.values()))["identity"].get("init_weights")  # SHA-256
    return ({} if begun is None else {"began_with": begun}) | {
        "git_commit": checkpoints[stage].get("git_commit", "unknown"),
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
