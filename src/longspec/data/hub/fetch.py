"""Datasets of the Hugging Face hub as files of this machine, pinned: the `fetch` verb.

data/hub/{dataset}/manifest.json   source, revision, repository, commit, size and SHA-256 of each file
data/hub/{dataset}/files/...       the files, under their paths in the repository; they may be placed there by hand
data/hub/{dataset}/files/.cache/   of huggingface_hub, while a download is under way; the next fetch goes on with it
"""

import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longspec.atomic_files import check_files, describe_files, files_below, fsync_path, read_json, sha256_file, write_manifest
from longspec.data.hub.names import CARD, Source, UnavailableError, choose, lacking, matches, parse
from longspec.data.read.source_files import ARCHIVE, kind_of
from longspec.shown import FULL, brief

LOG = logging.getLogger(__name__)
BY_HAND = "placed by hand"
FILES = "files"
UNFINISHED = ".cache"  # what huggingface_hub leaves among the files of a download that was killed
MANIFEST = "data/hub/{dataset}/manifest.json"
Manifest = dict[str, Any]
Remote = Any  # a file of a repository, as huggingface_hub describes it: RepoFile


def _is_copied(path: Path, remote: Remote) -> bool:
    """Tell whether a file on this machine has exactly the bytes of one of the hub."""
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    if remote.lfs:
        return bool(sha256_file(path) == remote.lfs.sha256)
    # Small files are no large-file objects: git's own hash stands for them.
    content = b"blob %d\0" % remote.size + path.read_bytes()
    return bool(hashlib.sha1(content, usedforsecurity=False).hexdigest() == remote.blob_id)


@contextmanager
def _hub() -> Iterator[Any]:
    """The hub's client, with HF_TOKEN or no token, not one that a login left here; what it raises becomes UnavailableError."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UnavailableError("HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi  # not above: Snakemake imports this module for every plan
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request, signed addresses among them
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or False)
    except (HTTPError, OSError, ValueError) as error:  # all that the hub's client and its HTTP client raise
        if isinstance(error, OSError) and error.errno in FULL:
            raise ValueError(f"{error.filename or error}: {error.strerror}; make room and fetch again") from error
        # That error alone says nothing of what happened.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        closed = "" if os.environ.get("HF_TOKEN") else "; HF_TOKEN, which opens closed repositories, is not set"
        raise UnavailableError(f"the hub gives nothing ({type(cause).__name__}: {brief(cause)}{closed})") from error


def _look_up(source: Source, revision: str) -> tuple[str, dict[str, Remote]]:
    """The commit that a revision (branch, tag, commit) names now, and all files of the repository at it."""
    with _hub() as api:
        commit = api.dataset_info(source.repository, revision=revision).sha
        entries = list(api.list_repo_tree(source.repository, recursive=True, revision=commit, repo_type="dataset"))
    found = {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}  # the others are folders
    for name in found:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{source.text}: the name {name!r} leads out of the repository")
    return commit, found


def _download(source: Source, commit: str, files: dict[str, Remote], folder: Path) -> None:
    names = [escape(name) for name in files]
    with _hub() as api:
        api.snapshot_download(source.repository, repo_type="dataset", revision=commit, allow_patterns=names, local_dir=folder)
    damaged = [name for name, remote in files.items() if not _is_copied(folder / name, remote)]
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    if damaged:
        raise ValueError(f"{source.text}: {damaged[0]}: the bytes that arrived are not those of commit {commit}; fetch again")
    for name, remote in files.items():
        fsync_path(folder / name)
        LOG.info("%s: %d bytes", name, remote.size)


def _chosen(source: Source, commit: str, files: dict[str, Remote]) -> list[str]:
    card = ""
    if not source.file and CARD in files:
        with TemporaryDirectory() as folder:
            _download(source, commit, {CARD: files[CARD]}, Path(folder))
            card = (Path(folder) / CARD).read_text(encoding="utf-8")
    return _readable(choose(source, sorted(files), card))


def _readable(names: list[str]) -> list[str]:
    """The names. Raises ValueError for a file that nothing reads, before it comes."""
    for name in names:
        if not name.endswith(ARCHIVE):
            kind_of(Path(name))
    return names


def _write(out: Path, source: Source, revision: str, commit: str, names: list[str], kept: Manifest | None) -> Manifest:
    files = describe_files(out.parent, [f"{FILES}/{name}" for name in names])
    if kept and kept["commit"] == commit and kept["files"] != files:
        raise ValueError(f"{source.text}: the hub has other bytes than {out} keeps; to accept them remove that file")
    pins = {"source": source.text, "revision": revision, "repository": source.repository, "commit": commit}
    write_manifest(out, out.parent, {**pins, "files": files})
    return {**pins, "files": files}


def _missing(out: Path, kept: Manifest | None) -> list[str]:
    """The kept files that are not there. Raises ValueError for one whose bytes are others."""
    files = kept["files"] if kept else {}
    there = {name: file for name, file in files.items() if (out.parent / name).is_file()}
    advice = "remove the file to fetch it again; to train on a version of your own, name that file as the source"
    check_files(out.parent, there, out, once=True, advice=advice)
    return [name.removeprefix(f"{FILES}/") for name in files if name not in there]


def _bring(source: Source, commit: str, files: dict[str, Remote], folder: Path, old: Manifest) -> None:
    """Download what is not there. Raises ValueError for a file that somebody else has put there."""
    wanted = {name: remote for name, remote in files.items() if not _is_copied(folder / name, remote)}
    for name in wanted:
        path, before = folder / name, old.get("files", {}).get(f"{FILES}/{name}", {})
        if path.exists() and (old.get("commit") == BY_HAND or sha256_file(path) != before.get("sha256")):
            raise ValueError(f"{path}: its bytes are not those of commit {commit}; move it away and fetch again")
        path.unlink(missing_ok=True)
    if wanted:
        _download(source, commit, wanted, folder)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def _placed_by_hand(source: Source, folder: Path, old: Manifest) -> list[str]:
    """Return the files of a name among those that are there. Raises ValueError for a part of a numbered set."""
    known = {Path(name).relative_to(FILES).as_posix() for name in old.get("files", {})}
    found = sorted(files_below(folder))
    if source.file:
        found = [name for name in found if matches(source, name)]
    else:  # offline a split's files are not known: all files placed here count, but not those that another source has left
        found = [name for name in found if name not in known and name != CARD]
    if missing := lacking(source, found):
        raise ValueError(f"{source.text}: placed by hand in {folder}, but without {brief(', '.join(missing))}; place these too")
    return _readable(found)


def make(text: str, revision: str, out: Path) -> Manifest:
    """Have the files of an hf: name beside the manifest `out`, at the commit the manifest keeps; returns the manifest.

    Raises ValueError for what differs from the kept manifest, and, when the hub cannot be used and no files were placed by
    hand, with the files to get and their places.
    """
    source, folder = parse(text), out.parent / FILES
    old: Manifest = read_json(out) if out.is_file() else {}
    kept = old if (old.get("source"), old.get("revision")) == (text, revision) else None
    missing, names = _missing(out, kept), []
    if kept and not missing and kept["commit"] in (BY_HAND, revision):
        return kept
    if kept and kept["commit"] == BY_HAND:
        raise ValueError(f"{folder / missing[0]}: missing; place it there again, or remove {out} to ask the hub for it")
    try:
        commit, remote = _look_up(source, revision)
        if kept and kept["commit"] != commit:
            raise ValueError(
                f"{text}: revision '{revision}' is commit {commit} now, {out} keeps {kept['commit']}; set "
                f"`revision: {kept['commit']}` to stay, or `revision: {commit}` to accept the new one"
            )
        names = _chosen(source, commit, remote)
        _bring(source, commit, {name: remote[name] for name in names}, folder, old)
        return _write(out, source, revision, commit, names, kept)
    except UnavailableError as fault:
        if kept and not missing:
            LOG.warning("%s: %s; the files are those that %s keeps", text, fault, out)
            return kept
        asked = missing or names or [source.file or f"the data files of '{':'.join(source.parts) or 'train'}', and no others,"]
        page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/datasets/{source.repository}/tree/{revision}"
        fix = f"place {brief(', '.join(asked))} from {page} in {folder}/, under the same paths, then run the same command again"
        # What an interrupted download has left was not placed by hand.
        names = [] if kept or (folder / UNFINISHED).exists() else _placed_by_hand(source, folder, old)
        if not names:
            raise ValueError(f"{text}: {fault}; {fix}; after an interrupted download remove {folder / UNFINISHED}") from fault
        LOG.warning("%s: %s; taking what was placed by hand: %s", text, fault, ", ".join(names))
        return _write(out, source, revision, BY_HAND, names, kept)


def read_fetched(path: Path, key: str, source: str, revision: str) -> tuple[list[Path], Manifest]:
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
