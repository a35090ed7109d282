"""Folders of models: which files hold the weights, and how a folder comes from the Hugging Face hub.

No torch: runs are planned with it, and login nodes fetch.
"""

import logging
import os
from pathlib import Path

from longspec.atomic_files import read_json

WEIGHT_MAP = "weight_map"
INDEX = ".index.json"
ELSEWHERE = ["consolidated*", "*/*.safetensors"]  # the same weights once more, laid out for other programs
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, every shard that an index lists. Raises ValueError when one is missing."""
    for whole in WEIGHTS:
        if (folder / whole).is_file():  # first, as transformers has it: an index beside it may be of an earlier save
            return [whole]
        index = folder / f"{whole}{INDEX}"
        if index.is_file():
            return [*sorted(set(read_weight_map(index).values())), index.name]
    raise ValueError(f"{folder}: no weights; expected {' or '.join(WEIGHTS)}, or shards with their index")


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the file beside the index that holds it. Raises ValueError for a damaged index and for a missing file."""
    where = read_json(index).get(WEIGHT_MAP)
    if not where or not isinstance(where, dict) or any(Path(str(file)).name != file for file in where.values()):
        raise ValueError(
            f"{index}: {WEIGHT_MAP}: must hold, for each tensor, the name of a file beside the index; download it again"
        )
    for file in sorted(set(where.values())):
        if not (index.parent / file).is_file():
            raise ValueError(f"{index.parent / file}: missing, though {index.name} lists it; copy or download it again")
    return where


def download(repository: str, folder: Path, patterns: list[str], revision: str | None, otherwise: str) -> str:
    """Bring a repository's files into `folder`, going on where an earlier try ended; returns the commit's hash.

    revision: a branch, tag or commit; None: the main branch. Raises ValueError that says why it cannot be fetched, and how to
    do without the network: `otherwise` says what to place where.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request, signed addresses among them
    # False: no token that a login left on this machine.
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or False)
    try:
        commit = hub.model_info(repository, revision=revision).sha
        hub.snapshot_download(repository, revision=commit, allow_patterns=patterns, ignore_patterns=ELSEWHERE, local_dir=folder)
    except (HTTPError, OSError, ValueError) as error:  # all that the hub and its HTTP client raise
        name = repository if revision is None else f"{repository}@{revision}"
        raise ValueError(
            f"hf:{name}: cannot be fetched ({type(error).__name__}: {error}). For a closed repository set HF_TOKEN. Without "
            f"network, download it elsewhere, {otherwise}"
        ) from error
    assert commit is not None
    return commit
