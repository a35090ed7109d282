"""What `fetch` has brought from the hub: where its manifest lies, and the files that it names."""

from pathlib import Path
from typing import Any

from longspec.atomic_files import check_files, read_json

MANIFEST = "data/hub/{dataset}/manifest.json"


def read_fetched(path: Path, key: str, source: str, revision: str) -> tuple[list[Path], dict[str, Any]]:
    """The files of a manifest, and the manifest.

    key: of the entry that names the source, for errors. Raises ValueError for a manifest that is missing or of another source
    or revision, and for a file that is missing or has other bytes.
    """
    if not path.is_file():
        raise ValueError(
            f"{key}.source: {source} must be fetched first: python -m longspec.data fetch --source {source} "
            f"--revision {revision} --out {path}"
        )
    manifest = read_json(path)
    for name, wanted in (("source", source), ("revision", revision)):
        if manifest.get(name) != wanted:
            raise ValueError(f"{path}: {name}: is {manifest.get(name)}, but {key}.{name} is {wanted}; fetch again")
    check_files(path.parent, manifest["files"])
    return [path.parent / file for file in sorted(manifest["files"])], manifest
