"""Origin of a checkpoint that this project trained: its recipe, the folder of its stage, its target."""

from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json_object
from longspec.config import Recipe, load, plain, typed
from longspec.draft_vocabulary import DraftVocabulary
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, read_manifest
from longspec.train.lifetime.admission import refuse_other_recipe


def recipe_and_folder(checkpoint: Path, recipe_path: Path | None, out: Path | None) -> tuple[Any, Path]:
    """The recipe of a checkpoint's draft and where the draft goes; both may be given.

    Raises ValueError when they are neither given nor known, and for another recipe than the checkpoint was trained by.
    """
    identity, stage = _of_ours(checkpoint)
    content = None if identity is None else identity["recipe"]
    if content is None and (recipe_path is None or out is None):
        raise ValueError(f"{checkpoint}: says nothing of its recipe and its stage; give --recipe and --out")
    own = None if content is None else typed(content, Recipe, checkpoint)
    recipe = own if recipe_path is None else load(recipe_path, Recipe)
    if own is not None and recipe_path is not None:
        refuse_other_recipe(checkpoint, plain(own), recipe_path, plain(recipe))
    return recipe, out or stage / f"draft-{checkpoint.stem}"


def check_vocabulary(checkpoint: Path, path: Path | None, vocabulary: DraftVocabulary | None) -> None:
    """Raise ValueError for another draft vocabulary than a checkpoint of ours was trained with."""
    identity, _ = _of_ours(checkpoint)
    if identity is not None and vocabulary is not None and identity.get("vocabulary") != vocabulary.hash:
        raise ValueError(
            f"{path}: ids: are not those that {checkpoint} was trained with, so that its head would say other tokens; give the "
            "file that its stage was trained with"
        )


def _of_ours(checkpoint: Path) -> tuple[dict[str, Any] | None, Path]:
    """Identity and stage's folder of a stage's checkpoint.json or of a slot; no identity for other sources."""
    if checkpoint.name == "checkpoint.json":
        content, stage = read_json_object(checkpoint), checkpoint.absolute().parent
    elif (checkpoint / MANIFEST).is_file():
        content, stage = read_manifest(checkpoint), checkpoint.absolute().parents[1]
    else:
        return None, Path()
    return content.get("identity"), stage


def target_manifest(model: str) -> Path:
    """Where the workflow leaves a model's manifest. Raises ValueError when it is not there."""
    path = Path("models", model, "target_manifest.json")
    if not path.is_file():
        raise ValueError(f"{path}: no such file here; give --target, the target_manifest.json of {model}")
    return path
