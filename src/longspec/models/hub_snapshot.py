"""Repositories of models on the Hugging Face hub, brought into a folder of ours. No torch: login nodes fetch."""

import os
from pathlib import Path
from typing import Any


def download(repository: str, folder: Path, patterns: list[str], revision: str | None, otherwise: str) -> str:
    """Bring a repository's files into `folder`, going on where an earlier try ended; returns the commit's hash.

    revision: a branch, tag or commit; None: the main branch. Raises ValueError that says why it cannot be fetched, and how to
    do without the network: `otherwise` says what to place where.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError

    endpoint = os.environ.get("HF_ENDPOINT") or None
    token = os.environ.get("HF_TOKEN") or False  # False: no token that a login left on this machine
    try:
        commit = HfApi(endpoint=endpoint, token=token).model_info(repository, revision=revision).sha
        where: dict[str, Any] = {"local_dir": folder, "endpoint": endpoint, "token": token}
        snapshot_download(repository, revision=commit, allow_patterns=patterns, **where)
    except (HTTPError, OSError, ValueError) as error:  # all that the hub and its HTTP client raise
        name = repository if revision is None else f"{repository}@{revision}"
        raise ValueError(
            f"hf:{name}: cannot be fetched ({type(error).__name__}: {error}). For a closed repository set HF_TOKEN. Without "
            f"network, download it elsewhere, {otherwise}"
        ) from error
    assert commit is not None
    return commit
