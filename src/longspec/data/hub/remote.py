"""Requests to the Hugging Face hub: the commit of a dataset repository, its files, their bytes."""

import errno
import hashlib
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from longspec.atomic_files import sha256_file
from longspec.data import Progress
from longspec.shown import brief

LOG = logging.getLogger(__name__)
CONNECTIONS = 4


class UnavailableError(ValueError):
    """The hub cannot be asked, or has not what it is asked for; the message says why in one line."""


@dataclass(frozen=True)
class Remote:
    """One file of a repository: its size in bytes, the hash of its git blob, and its SHA-256 where the hub knows it."""

    size: int
    blob: str
    sha256: str | None

    def is_copied_in(self, path: Path) -> bool:
        """Whether a file on this machine has exactly these bytes."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        if self.sha256:
            return sha256_file(path) == self.sha256
        # Small files are no large-file objects: git's own hash stands for them.
        content = b"blob %d\0" % self.size + path.read_bytes()
        return hashlib.sha1(content, usedforsecurity=False).hexdigest() == self.blob


def page(repository: str) -> str:
    """The address of a dataset repository, on the mirror that HF_ENDPOINT names if it does."""
    return f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/datasets/{repository}"


def _reason(error: Exception, revision: str) -> str:
    """Why the hub does not give what it is asked for."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _reason(error.__cause__, revision)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, errors.GatedRepoError):
        return "the repository is gated: accept its terms on its page and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision '{revision}'"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such dataset repository, or it is closed and HF_TOKEN is not set or opens others"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refuses ({brief(error)})"
    return f"no answer from the hub ({type(error).__name__}: {brief(error)})"


def _api() -> Any:
    """The hub's client. Its token is HF_TOKEN or none: not one that a login left on this machine."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UnavailableError("HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request, signed addresses among them
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or False)


def look_up(repository: str, revision: str) -> tuple[str, dict[str, Remote]]:
    """The commit that a revision (branch, tag, commit) names now, and all files of the repository at it."""
    api = _api()
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.hf_api import RepoFile

    try:
        commit = api.dataset_info(repository, revision=revision).sha
        entries = list(api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset"))
    except (HTTPError, OSError, ValueError) as error:  # all that the hub's client and its HTTP client raise
        raise UnavailableError(_reason(error, revision)) from error
    files = {e.path: Remote(e.size, e.blob_id, e.lfs.sha256 if e.lfs else None) for e in entries if isinstance(e, RepoFile)}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{page(repository)}: the name {name!r} leads out of the repository")
    return commit, files


def download(repository: str, commit: str, files: dict[str, Remote], folder: Path, progress: Progress = None) -> None:
    """Bring files into `folder` and check their bytes; those that an earlier, killed download completed are kept."""
    api = _api()
    from huggingface_hub.errors import HTTPError

    def bring(name: str) -> None:
        api.hf_hub_download(repository, name, repo_type="dataset", revision=commit, local_dir=folder)
        if not files[name].is_copied_in(folder / name):
            (folder / name).unlink()
            raise ValueError(f"{repository}/{name}: the bytes that arrived are not those of commit {commit}; fetch again")
        LOG.info("%s: %d bytes", name, files[name].size)
        if progress:
            progress(1)

    for path in folder.rglob("*.incomplete"):  # the client begins such a file anew, under another name
        path.unlink()
    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        list(pool.map(bring, files))
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{folder}: {error.strerror}; make room and fetch again") from error
        raise UnavailableError(_reason(error, commit)) from error
    finally:
        pool.shutdown(cancel_futures=True)
