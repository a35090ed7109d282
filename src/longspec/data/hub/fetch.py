"""Datasets of the Hugging Face hub as files of this machine, pinned: the `fetch` verb.

data/hub/{dataset}/manifest.json   source, revision, repository, commit, size and SHA-256 of each file
data/hub/{dataset}/files/...       the files, under their paths in the repository; they may be placed there by hand
data/hub/{dataset}/files/.cache/   of huggingface_hub, while a download is under way; the next fetch goes on with it
"""

import errno
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from longspec.atomic_files import check_files, describe_files, fsync_path, read_json, sha256_file, write_manifest
from longspec.data.hub.names import CARD, Source, UnavailableError, check_complete, choose, parse
from longspec.data.read.source_files import ARCHIVE, kind_of
from longspec.shown import brief

LOG = logging.getLogger(__name__)
BY_HAND = "placed by hand"
FILES = "files"
MANIFEST = "data/hub/{dataset}/manifest.json"


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


@contextmanager
def _hub(revision: str) -> Iterator[Any]:
    """The hub's client, with HF_TOKEN or no token, not one that a login left here; what it raises becomes UnavailableError."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UnavailableError("HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request, signed addresses among them
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or False)
    except (HTTPError, OSError, ValueError) as error:  # all that the hub's client and its HTTP client raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{error.filename or error}: {error.strerror}; make room and fetch again") from error
        raise UnavailableError(_reason(error, revision)) from error


def _look_up(source: Source, revision: str) -> tuple[str, dict[str, Remote]]:
    """The commit that a revision (branch, tag, commit) names now, and all files of the repository at it."""
    with _hub(revision) as api:
        from huggingface_hub.hf_api import RepoFile

        commit = api.dataset_info(source.repository, revision=revision).sha
        entries = list(api.list_repo_tree(source.repository, recursive=True, revision=commit, repo_type="dataset"))
    files = {e.path: Remote(e.size, e.blob_id, e.lfs.sha256 if e.lfs else None) for e in entries if isinstance(e, RepoFile)}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{source.text}: the name {name!r} leads out of the repository")
    return commit, files


def _download(source: Source, commit: str, files: dict[str, Remote], folder: Path) -> None:
    """Bring files of a commit below a folder and check their bytes."""
    names = [escape(name) for name in files]
    with _hub(commit) as api:
        api.snapshot_download(source.repository, repo_type="dataset", revision=commit, allow_patterns=names, local_dir=folder)
    damaged = [name for name, remote in files.items() if not remote.is_copied_in(folder / name)]
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    if damaged:
        raise ValueError(f"{source.text}: {damaged[0]}: the bytes that arrived are not those of commit {commit}; fetch again")
    for name, remote in files.items():
        fsync_path(folder / name)
        LOG.info("%s: %d bytes", name, remote.size)


def _chosen(source: Source, commit: str, files: dict[str, Remote]) -> list[str]:
    """The files that a name stands for, each of a kind that is read."""
    card = ""
    if not source.file and CARD in files:
        with TemporaryDirectory() as folder:
            _download(source, commit, {CARD: files[CARD]}, Path(folder))
            card = (Path(folder) / CARD).read_text(encoding="utf-8")
    names = choose(source, sorted(files), card)
    _check_kinds(names)
    return names


def _check_kinds(names: list[str]) -> None:
    """Refuse a file that nothing reads, before it comes."""
    for name in names:
        if not name.endswith(ARCHIVE):
            kind_of(Path(name))


@dataclass(frozen=True)
class Task:
    """One dataset to fetch; `old` is the manifest of an earlier fetch, `kept` that of one of the same thing."""

    source: Source
    revision: str
    out: Path
    old: dict[str, Any]

    @property
    def kept(self) -> dict[str, Any] | None:
        asked = (self.source.text, self.revision)
        return self.old if (self.old.get("source"), self.old.get("revision")) == asked else None

    @property
    def files(self) -> Path:
        return self.out.parent / FILES

    @property
    def unfinished(self) -> Path:
        """What huggingface_hub leaves there of a download that was killed."""
        return self.files / ".cache"

    def write(self, commit: str, names: list[str]) -> dict[str, Any]:
        """Describe the files in a manifest and write it."""
        pins = {"source": self.source.text, "revision": self.revision, "repository": self.source.repository}
        files = describe_files(self.out.parent, [f"{FILES}/{name}" for name in names])
        if self.kept and self.kept["commit"] == commit and self.kept["files"] != files:
            raise ValueError(
                f"{self.source.text}: the hub has other bytes than {self.out} keeps; to accept them remove that file"
            )
        manifest = {**pins, "commit": commit, "files": files}
        write_manifest(self.out, self.out.parent, manifest)
        return manifest

    def missing(self) -> list[str]:
        """List the kept files that are not there. Raises ValueError for one whose bytes are others."""
        files = self.kept["files"] if self.kept else {}
        there = {name: file for name, file in files.items() if (self.out.parent / name).is_file()}
        advice = "remove the file to fetch it again; to train on a version of your own, name that file as the source"
        check_files(self.out.parent, there, self.out, once=True, advice=advice)
        return [name.removeprefix(f"{FILES}/") for name in files if name not in there]


def _check_commit(task: Task, commit: str, remote: dict[str, Remote]) -> None:
    """Refuse another commit than the kept manifest's; the error says which files have changed."""
    if task.kept is None or task.kept["commit"] == commit:
        return
    changed = []
    for name, expected in task.kept["files"].items():
        there = remote.get(name.removeprefix(f"{FILES}/"))
        if there is None or there.size != expected["bytes"] or there.sha256 not in (None, expected["sha256"]):
            changed.append(name.removeprefix(f"{FILES}/"))
    what = f"changed or gone: {', '.join(changed)}" if changed else "the data files have not changed"
    raise ValueError(
        f"{task.source.text}: revision '{task.revision}' is commit {commit} now, {task.out} keeps {task.kept['commit']}"
        f" ({what}); set `revision: {task.kept['commit']}` to stay, or `revision: {commit}` to accept the new one"
    )


def _bring(task: Task, commit: str, files: dict[str, Remote]) -> dict[str, Any]:
    """Download what is not there; the manifest. Raises ValueError for a file that somebody else has put there."""
    wanted = {name: remote for name, remote in files.items() if not remote.is_copied_in(task.files / name)}
    for name in wanted:
        path, before = task.files / name, task.old.get("files", {}).get(f"{FILES}/{name}", {})
        if path.exists() and (task.old.get("commit") == BY_HAND or sha256_file(path) != before.get("sha256")):
            raise ValueError(f"{path}: its bytes are not those of commit {commit}; move it away and fetch again")
        path.unlink(missing_ok=True)
    if wanted:
        _download(task.source, commit, wanted, task.files)
    manifest = task.write(commit, sorted(files))
    shutil.rmtree(task.unfinished, ignore_errors=True)
    return manifest


def _how_to_place(task: Task, names: list[str]) -> str:
    """Which files to get and where to put them when the hub cannot be used."""
    page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/datasets/{task.source.repository}/tree/{task.revision}"
    names = names or [task.source.file]
    if names == [""]:
        asked = ":".join(task.source.parts) or "train"
        return f"place the data files of '{asked}', and no others, from {page} in {task.files}/, under the same paths"
    listed = ", ".join(str(task.files / name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"place {listed}{more}, from the same paths of {page}"


def _from_hand(task: Task, missing: list[str], names: list[str], fault: UnavailableError) -> dict[str, Any]:
    """The manifest of files that are there although the hub is not. Raises ValueError that says what to place where."""
    refusal = f"{task.source.text}: {fault}; {_how_to_place(task, missing or names)}, then run the same command again"
    if task.kept and not missing:
        LOG.warning("%s: %s; the files are those that %s keeps", task.source.text, fault, task.out)
        return task.kept
    if task.kept or task.unfinished.exists():
        raise ValueError(f"{refusal} (after an interrupted download remove {task.unfinished} too)")
    old = {Path(name).relative_to(FILES).as_posix() for name in task.old.get("files", {})}
    found = {path.relative_to(task.files).as_posix() for path in task.files.rglob("*") if path.is_file()}
    try:
        # Offline a split's files are not known: all files placed here count, but not those that another source has left.
        chosen = choose(task.source, sorted(found), "") if task.source.file else sorted(found - old - {CARD})
        check_complete(task.source, chosen)
    except UnavailableError as lacking:
        raise ValueError(f"{refusal}; now: {lacking}" if found else refusal) from fault
    if not chosen:
        raise ValueError(refusal) from fault
    _check_kinds(chosen)
    LOG.warning("%s: %s; taking what was placed by hand: %s", task.source.text, fault, ", ".join(chosen))
    return task.write(BY_HAND, chosen)


def make(text: str, revision: str, out: Path) -> dict[str, Any]:
    """Have the files of an hf: name beside the manifest `out`, at the commit the manifest keeps; returns the manifest.

    Raises ValueError for what differs from the kept manifest, and, when the hub cannot be used and no files were placed by
    hand, with the files to get and their places.
    """
    task = Task(parse(text), revision, out, read_json(out) if out.is_file() else {})
    missing, names = task.missing(), []
    if task.kept and not missing and task.kept["commit"] in (BY_HAND, revision):
        return task.kept
    if task.kept and task.kept["commit"] == BY_HAND:
        raise ValueError(f"{task.files / missing[0]}: missing; place it there again, or remove {out} to ask the hub for it")
    try:
        commit, remote = _look_up(task.source, revision)
        _check_commit(task, commit, remote)
        names = _chosen(task.source, commit, remote)
        return _bring(task, commit, {name: remote[name] for name in names})
    except UnavailableError as fault:
        return _from_hand(task, missing, names, fault)


def read_fetched(path: Path, key: str, source: str, revision: str) -> tuple[list[Path], dict[str, Any]]:
    """Read which files a manifest names, and the manifest.

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
    check_files(path.parent, manifest["files"], path, once=True)
    return [path.parent / file for file in sorted(manifest["files"])], manifest
