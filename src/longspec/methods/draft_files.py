"""Read draft folders and weight files of any method: where the weights are, and what config.json says."""

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from shlex import join
from typing import Any, TypeVar

from omegaconf import MISSING

from longspec import methods
from longspec.atomic_files import check_files, describe_files, files_below, read_json, write_manifest
from longspec.config.faults import faults_of
from longspec.config.names import HUB_PREFIX

PTH, SAFETENSORS, CONFIG = "draft_model_weights.pth", "model.safetensors", "config.json"
METHOD = "draft"  # the field of CONFIG that names the method
MASK_EMBEDDING = "mask_embedding.pt"  # of published drafts alone, which are refused
FIELDS = {"target": dict, "settings": dict, "target_path": str, "target_source": str}  # the fields of CONFIG that are read
AGAIN = (
    "make the draft folder again by python -m longspec.draft extract, or import for a draft that was made elsewhere; or give a "
    "weight file that stands by itself"
)
TRAINING_PREFIX = "draft_model."
Settings = TypeVar("Settings")


def draft_weights_file(path: str | Path) -> Path:
    """Return the file of weights of a .pth, a .safetensors or a draft folder. Raises ValueError if there is none, or if the
    folder's files differ from its manifest.
    """
    path = Path(path)
    check_draft_files(path if path.is_dir() else path.parent)
    if path.is_dir():
        path = path / SAFETENSORS if (path / SAFETENSORS).is_file() else path / PTH
    if not path.is_file():
        raise ValueError(f"{path}: no such draft weights; give a .pth, a .safetensors or a folder with {SAFETENSORS} or {PTH}")
    return path


def draft_manifest(folder: Path) -> Path:
    """Return the path of a draft folder's manifest: next to it, since the folder holds only what is published."""
    return folder.parent / f"{folder.name}_manifest.json"


def weights_hash(folder: Path) -> str | None:
    """Return the hash of a draft folder's weights as its manifest tells it; None if the folder has no manifest yet."""
    with suppress(OSError, ValueError, KeyError):
        return str(read_json(draft_manifest(folder))["files"]["model.safetensors"]["sha256"])
    return None


def write_draft_manifest(folder: Path) -> None:
    """Write the manifest of a draft folder that a workflow job made; readers of the folder check its files against it."""
    write_manifest(draft_manifest(folder), folder, {"files": describe_files(folder, files_below(folder))})


def check_draft_files(folder: Path) -> None:
    """Raise ValueError if a draft folder's files differ from its manifest. Copies and drafts made elsewhere have none."""
    manifest = draft_manifest(folder.absolute())  # a folder given as `.` has a name too
    if manifest.is_file():
        advice = f"have it made again after: {join(['rm', '-r', str(folder)])}"
        check_files(folder, read_json(manifest)["files"], manifest, advice=advice)


def read_draft_config(path: str | Path, method: str | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Return path and content of config.json, of a draft folder or next to a weight file; None: there is none of a draft.

    Raises ValueError that names a missing or wrong field, and if the draft's method is not `method`, if that is given.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / CONFIG).is_file():
        return None
    file, content = folder / CONFIG, read_json(folder / CONFIG)
    if METHOD not in content:
        return None  # a target's, for example
    if content[METHOD] not in methods.names():
        raise ValueError(f"{file}: {METHOD}: {content[METHOD]!r} is unknown here; known: {', '.join(methods.names())}")
    if method not in (None, content[METHOD]):
        raise ValueError(f"{file}: {METHOD}: is {content[METHOD]!r}, this draft is {method!r}; give a draft of this method")
    for name, kind in FIELDS.items():
        if not isinstance(content.get(name), kind):
            told = f"is {content[name]!r}" if name in content else "is missing"
            raise ValueError(f"{file}: {name}: {told}, must be {'an object' if kind is dict else 'a text'}; {AGAIN}")
    return file, content


def find_target(draft: Path, path: str) -> Path | None:
    """Return the folder of a draft's target from the path in the draft; None if it is not there.

    The path is tried from each folder above the draft, then from here: the workflow's root is one of them if it ran there, and
    another clone may have another target at the same path.
    """
    folders = (folder / path for folder in (*draft.absolute().parents, Path()))
    return next((folder for folder in folders if path and (folder / CONFIG).is_file()), None)


def target_and_draft(target_path: str, draft_path: str | None) -> tuple[str, str | None]:
    """Return the paths of target and draft; if the first path is a draft folder, it names its target.

    Raises ValueError if that target is no longer there.
    """
    found = read_draft_config(target_path) if draft_path is None and Path(target_path).is_dir() else None
    if found is None:
        return target_path, draft_path
    file, content = found
    source, path = content["target_source"], content["target_path"]
    if (folder := find_target(file, path)) is not None:
        return str(folder), target_path
    if source.startswith(HUB_PREFIX):
        return source.removeprefix(HUB_PREFIX), target_path
    raise ValueError(f"{file}: its target {path or '(unnamed)'} is not there; give both: the target's folder and the draft's")


def check_draft_config(path: str | Path, config: Any) -> None:
    """Raise ValueError that names each field in which this target differs from the one a draft folder was made for."""
    found = read_draft_config(path)
    if found is None:
        return
    file, content = found
    own = config.to_dict()
    wrong = [
        f"{name}: {value!r}, this target has {own.get(name)!r}"
        for name, value in content["target"].items()
        # The longest text is no property of the draft; all other fields change its numbers.
        if name != "max_position_embeddings" and own.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{file}: made for another target: {'; '.join(wrong)}")


def method_of_draft(path: str | Path) -> str:
    """Return the method that a draft folder names; for weights alone, the one whose published files have no configuration."""
    found = read_draft_config(path)
    if found is None:
        return methods.method_of_file()
    return str(found[1][METHOD])


def stored_settings(path: str | Path, schema: type[Settings]) -> Settings | None:
    """Return the settings in a draft's config.json as their dataclass; None for a file of weights alone.

    Fields with metadata `stored` False keep their defaults. Raises ValueError that names an invalid field.
    """
    found = read_draft_config(path)
    if found is None:
        return None
    file, content = found
    stored = [field for field in fields(schema) if field.metadata.get("stored", True)]  # type: ignore[arg-type]
    settings, known = content["settings"], {field.name: field for field in stored}
    strange = sorted(settings.keys() - known.keys())
    if strange:
        raise ValueError(f"{file}: settings: {', '.join(strange)}: unknown to this version, which knows {', '.join(known)}")
    for name, field in known.items():
        if name not in settings and field.default == MISSING:
            raise ValueError(f"{file}: settings: {name}: is missing; {AGAIN}")
    for fault in faults_of(schema, settings, "settings"):
        raise ValueError(f"{file}: {fault}; {AGAIN}")
    return schema(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})
