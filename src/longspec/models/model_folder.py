"""Find the weight files in folders of models, and download folders from the Hugging Face hub.

No torch: runs are planned with it, and login nodes fetch.
"""

import os
from pathlib import Path

from longspec.atomic_files import read_json

WEIGHT_MAP = "weight_map"
INDEX = ".index.json"
ELSEWHERE = ["consolidated*", "*/*.safetensors"]  # the same weights again, in other programs' layouts
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: Path) -> list[str]:
    """Return a folder's weight file, or all shards and then their index, by name. Raises ValueError if one is missing."""
    for whole in WEIGHTS:
        if (folder / whole).is_file():  # first, as in transformers: an index next to it may be of an earlier save
            return [whole]
        index = folder / f"{whole}{INDEX}"
        if index.is_file():
            return [*sorted(set(read_weight_map(index).values())), index.name]
    raise ValueError(f"{folder}: no weights; expected {' or '.join(WEIGHTS)}, or shards with their index")


def read_weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file name, from an index. Raises ValueError if the index is damaged or a file is missing."""
    where = read_json(index).get(WEIGHT_MAP)
    if not where or not isinstance(where, dict) or any(Path(str(file)).name != file for file in where.values()):
        raise ValueError(f"{index}: {WEIGHT_MAP}: must name a file beside the index for each tensor; download it again")
    for file in sorted(set(where.values())):
        if not (index.parent / file).is_file():
            raise ValueError(f"{index.parent / file}: missing, though {index.name} lists it; copy or download it again")
    return where


def download(repository: str, folder: Path, patterns: list[str], revision: str | None, otherwise: str) -> str:
    """Download a repository's files into `folder`, resuming an earlier try; return the commit's hash.

    revision: a branch, tag or commit; None: the main branch. Raises ValueError with the reason if the download fails, and with
    `otherwise`: what to place where without a network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    # False: no token that a login left on this machine.
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or False)
    try:
        commit = hub.model_info(repository, revision=revision).sha
        hub.snapshot_download(repository, revision=commit, allow_patterns=patterns, ignore_patterns=ELSEWHERE, local_dir=folder)
        fetched, there = folder / ".cache/huggingface/download", hub.list_repo_files(repository, revision=commit)
        for path in fetched.rglob("*.metadata"):  # of an earlier commit, or of another repository under this name
            if (name := path.relative_to(fetched).with_suffix("").as_posix()) not in there:
                (folder / name).unlink(missing_ok=True)
                path.unlink()
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # all errors of the hub, its HTTP client and Xet storage
        name = repository if revision is None else f"{repository}@{revision}"
        raise ValueError(
            f"hf:{name}: cannot be fetched ({type(error).__name__}: {error}). For a closed repository set HF_TOKEN. Without "
            f"network, download it elsewhere, {otherwise}"
        ) from error
    assert commit is not None
    return commit
