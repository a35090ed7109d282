"""Datasets of the Hugging Face hub as files of this machine, pinned to a commit: the `fetch` verb.

data/hub/{dataset}/manifest.json   source, revision, repository, commit, size and SHA-256 of each file
data/hub/{dataset}/files/...       the files, under their paths in the repository
data/hub/{dataset}/files/.cache/   of huggingface_hub: the commit of each file, and what is under way
"""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longspec.atomic_files import check_files, describe_files, read_json, sha256_file, write_manifest
from longspec.config.names import HUB_PREFIX, is_repository
from longspec.data.read.source_files import ARCHIVE, kind_of
from longspec.distributed import log
from longspec.shown import FULL, brief

FORMS = "hf:<owner>/<repository>[:config][:split] or hf:<owner>/<repository>/<file>, the file with * ? [...] if there are many"
CARD = "README.md"
FILES = "files"
MANIFEST = "data/hub/{dataset}/manifest.json"
Manifest = dict[str, Any]
Remote = Any  # a file of a repository, as huggingface_hub describes it: RepoFile


class UnavailableError(ValueError):
    """Say why the hub cannot be asked, or that it lacks what it is asked for, in one line."""


@dataclass(frozen=True)
class Source:
    """Hold a parsed hf: name: a repository, and its config and split (`parts`, either may be missing) or a file."""

    text: str
    repository: str
    parts: tuple[str, ...] = ()
    file: str = ""


def parse(text: str) -> Source:
    """Return an hf: name in parts. Raises ValueError if it has none of the two forms."""
    repository, *parts = text.removeprefix(HUB_PREFIX).split(":")
    owner, _, rest = repository.partition("/")
    name, slash, file = rest.partition("/")
    # A file's path is also looked for in a folder of ours, which it must not leave.
    inside = not slash or (file.isprintable() and not {"", ".", ".."} & set(file.split("/")))
    if not is_repository(f"{owner}/{name}") or not inside or not all(parts) or len(parts) > 2 or (slash and parts):
        raise ValueError(f"'{text}' is no name of a dataset of the hub: {FORMS}")
    return Source(text, f"{owner}/{name}", tuple(parts), file)


def _split_files(source: Source, names: list[str], card: str) -> list[str]:
    """Return the files of a config's split, as the library `datasets` finds them, on empty files of the same names."""
    from datasets import get_dataset_config_names, load_dataset_builder

    with TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "repository"
        root.mkdir()
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        if card:
            (root / CARD).write_text(card, encoding="utf-8")
        try:
            configs = get_dataset_config_names(str(root))
            # One part alone is a config where there is one of that name, else a split of the default config.
            config = source.parts[0] if len(source.parts) == 2 or set(source.parts) & set(configs) else None
            builder = load_dataset_builder(str(root), config, cache_dir=f"{folder}/cache")
        except (ValueError, OSError) as error:
            raise UnavailableError(f"its files cannot be told apart ({brief(error)})".replace(str(root), ".")) from error
        splits = builder.config.data_files or {}
        asked = source.parts[1:] if config else source.parts
        split = asked[0] if asked else "train" if len(splits) != 1 else next(iter(splits))
        if split not in splits:
            raise UnavailableError(
                f"config '{builder.config.name}' has no split '{split}'; its splits: {', '.join(sorted(splits)) or 'none'};"
                f" the repository's configs: {', '.join(sorted(configs))}"
            )
        return [Path(path).relative_to(root).as_posix() for path in splits[split]]


def choose(source: Source, names: list[str], card: str) -> list[str]:
    """Return the paths in a repository that a name stands for. card: the text of its README.md, which declares configs.

    Raises UnavailableError if there are none.
    """
    if not source.file:
        return sorted(_split_files(source, names, card))
    pattern = source.file.split("/")  # so * does not cross a slash
    alike = [name for name in names if name.count("/") == len(pattern) - 1 and all(map(fnmatchcase, name.split("/"), pattern))]
    chosen = [source.file] if source.file in names else sorted(alike)
    if not chosen:
        raise UnavailableError(f"there is no file '{source.file}' in it")
    return chosen


@contextmanager
def _hub() -> Iterator[Any]:
    """Yield the hub's client, with HF_TOKEN or no token, never a login's. Its errors become UnavailableError or ValueError."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UnavailableError("HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi  # not above: Snakemake imports this module for every plan
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or False)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # all that the hub, its HTTP client and Xet storage raise
        if isinstance(error, OSError) and error.errno in FULL:
            raise ValueError(f"{error.filename or error}: {error.strerror}; make room and fetch again") from error
        # That error alone does not say what happened.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        closed = "" if os.environ.get("HF_TOKEN") else "; HF_TOKEN, which opens closed repositories, is not set"
        raise UnavailableError(f"the hub gives nothing ({type(cause).__name__}: {brief(cause)}{closed})") from error


def _look_up(source: Source, revision: str) -> tuple[str, dict[str, Remote]]:
    """Return the commit that a revision (branch, tag, commit) names now, and all files of the repository at it."""
    with _hub() as api:
        commit = api.dataset_info(source.repository, revision=revision).sha
        entries = list(api.list_repo_tree(source.repository, recursive=True, revision=commit, repo_type="dataset"))
    found = {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}  # the others are folders
    for name in found:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{source.text}: the name {name!r} leads out of the repository")
    return commit, found


def _has_bytes_of(remote: Remote, path: Path) -> bool:
    return path.stat().st_size == remote.size and (not remote.lfs or sha256_file(path) == remote.lfs.sha256)


def _download(source: Source, commit: str, files: dict[str, Remote], folder: Path) -> None:
    """Bring the files that are missing or have other bytes at this commit. Raises ValueError if they arrive damaged."""
    names = [escape(name) for name in files]
    with _hub() as api:
        api.snapshot_download(source.repository, repo_type="dataset", revision=commit, allow_patterns=names, local_dir=folder)
    # If the hub refuses a file, an older one that is here is taken for it.
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise UnavailableError(f"the hub gives no {missing[0]}")
    damaged = [name for name, remote in files.items() if not _has_bytes_of(remote, folder / name)]
    for name in damaged:
        (folder / name).unlink()
    if damaged:
        raise ValueError(f"{source.text}: {damaged[0]}: what arrived are not the bytes of commit {commit}; fetch again")


def _chosen(source: Source, commit: str, files: dict[str, Remote]) -> dict[str, Remote]:
    """Return the files that a name stands for. Raises ValueError for one that nothing reads, before it is fetched."""
    card = ""
    if not source.file and CARD in files:
        with TemporaryDirectory() as folder:
            _download(source, commit, {CARD: files[CARD]}, Path(folder))
            card = (Path(folder) / CARD).read_text(encoding="utf-8")
    chosen = choose(source, sorted(files), card)
    for name in chosen:
        if not name.endswith(ARCHIVE):
            kind_of(Path(name))
    return {name: files[name] for name in chosen}


def make(text: str, revision: str, out: Path) -> Manifest:
    """Bring the files of an hf: name beside the manifest `out`, at the commit that it keeps; return the manifest.

    Raises ValueError for what differs from the kept manifest, and if the hub cannot be used and files are missing.
    """
    source, old = parse(text), read_json(out) if out.is_file() else {}
    kept: Manifest | None = old if (old.get("source"), old.get("revision")) == (text, revision) else None
    there = {name: file for name, file in kept["files"].items() if (out.parent / name).is_file()} if kept else {}
    check_files(out.parent, there, out, advice="remove the file to fetch it again, or name your own as the source")
    is_whole = kept is not None and there == kept["files"]
    if kept and is_whole and kept["commit"] == revision:
        return kept
    try:
        commit, remote = _look_up(source, revision)
        if kept and kept["commit"] != commit:
            raise ValueError(
                f"{text}: revision '{revision}' is commit {commit} now, {out} keeps {kept['commit']}; set "
                f"`revision: {kept['commit']}` to stay, or `revision: {commit}` to accept the new one"
            )
        remote = _chosen(source, commit, remote)
        _download(source, commit, remote, out.parent / FILES)
    except UnavailableError as fault:
        if kept and is_whole:
            log(f"WARNING {text}: {fault}; the files are those that {out} keeps")
            return kept
        raise ValueError(
            f"{text}: {fault}; correct the source, or fetch it where the hub gives it and copy {out.parent}/ here, or name "
            "files of this machine as the source"
        ) from fault
    files = describe_files(out.parent, [f"{FILES}/{name}" for name in remote])
    if kept and kept["files"] != files:
        raise ValueError(f"{text}: the hub has other bytes than {out} keeps; to accept them remove that file")
    manifest = {"source": text, "revision": revision, "repository": source.repository, "commit": commit, "files": files}
    return write_manifest(out, out.parent, manifest)


def read_fetched(path: Path, key: str, source: str, revision: str) -> tuple[list[Path], Manifest]:
    """Return the files that a manifest names, and the manifest. key: the entry that names the source, for errors.

    Raises ValueError if the manifest is missing or of another source or revision, and if a file is missing or has other
    bytes.
    """
    given = ["--source", source, "--revision", revision, "--out", str(path)]
    fetch = shlex.join(["python", "-m", "longspec.data", "fetch", *given])
    if not path.is_file():
        raise ValueError(f"{key}.source: {source} must be fetched first: {fetch}")
    manifest = read_json(path)
    for name, wanted in (("source", source), ("revision", revision)):
        if manifest.get(name) != wanted:
            raise ValueError(f"{path}: {name}: is {manifest.get(name)}, but {key}.{name} is {wanted}; fetch again")
    check_files(path.parent, manifest["files"], path, advice=f"remove it if it is there, then: {fetch}")
    return [path.parent / file for file in sorted(manifest["files"])], manifest
