"""Fetch a draft made elsewhere, from a folder or a repository of the hub, and describe it in a manifest. No torch."""

from pathlib import Path
from typing import Any

from longspec import methods
from longspec.atomic_files import describe_files, read_json
from longspec.config.names import HUB_PREFIX, hub_source
from longspec.methods.draft_files import CONFIG, MASK_EMBEDDING, METHOD
from longspec.models.model_folder import download, weight_files

PATTERNS = [CONFIG, "*.safetensors*", "pytorch_model*.bin*", MASK_EMBEDDING]


def check_folder(folder: Path) -> list[str]:
    """Return the files to keep of a draft's folder. Raises ValueError if one is missing or the draft is not a known one."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG}: missing; give the folder of a draft, with its {CONFIG} and its weights")
    config = read_json(folder / CONFIG)
    if METHOD not in config and methods.published_method(config) is None:
        raise ValueError(
            f"{folder / CONFIG}: architectures: {config.get('architectures')!r}: is no published draft that is known; "
            f"those of {', '.join(methods.names())} are"
        )
    return [CONFIG, *weight_files(folder)]


def fetch(source: str, place: Path) -> tuple[Path, dict[str, Any]]:
    """Return a draft's folder (`place` if it comes from the hub) and its manifest: source, hashes of files, commit on the hub.

    Raises ValueError if the folder holds no draft or the download fails.
    """
    more, folder = {}, Path(source).expanduser()
    if source.startswith(HUB_PREFIX):
        repository, revision = hub_source(source)
        folder = place
        otherwise = f"place the draft's {CONFIG} and weights where this machine can read them, and give the folder"
        more["commit"] = download(repository, folder, PATTERNS, revision, otherwise)
    elif folder.is_file():
        return folder, {"source": source, "files": describe_files(folder.parent, [folder.name])}
    elif not folder.is_dir():
        raise ValueError(f"{source}: no such folder; give {HUB_PREFIX}<owner>/<repository>[@revision] or a draft's folder")
    return folder, {"source": source, "files": describe_files(folder, check_folder(folder)), **more}
