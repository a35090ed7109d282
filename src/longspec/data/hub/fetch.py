"""Datasets of the Hugging Face hub as files of this machine, pinned: the `fetch` verb.

data/hub/{dataset}/manifest.json   source, revision, repository, commit, size and SHA-256 of each file
data/hub/{dataset}/files/...       the files, under their paths in the repository; they may be placed there by hand
data/hub/{dataset}/.incoming/      a download under way; the next fetch goes on with it
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.atomic_files import check_files, describe_files, fsync_path, read_json, sha256_file, write_json
from longspec.data import Progress
from longspec.data.hub.names import CARD, Source, check_complete, choose, parse
from longspec.data.hub.remote import Remote, UnavailableError, download, look_up, page
from longspec.data.read.source_files import ARCHIVE, kind_of

LOG = logging.getLogger(__name__)
BY_HAND = "placed by hand"
FILES = "files"
MANIFEST = "data/hub/{dataset}/manifest.json"


@dataclass(frozen=True)
class Task:
    """One dataset to fetch; `kept` is the manifest of an earlier fetch of the same thing, `old` that of any."""

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
    def incoming(self) -> Path:
        return self.out.parent / ".incoming"

    @property
    def moving(self) -> Path:
        """Stands there while finished downloads take their places: `files` may then hold a part of them."""
        return self.incoming / ".moving"

    def write(self, commit: str, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The manifest, written."""
        pins = {"source": self.source.text, "revision": self.revision, "repository": self.source.repository}
        manifest = {**pins, "commit": commit, "files": files}
        write_json(self.out, manifest)
        return manifest


def _missing(task: Task) -> list[str]:
    """The kept files that are not there. Raises ValueError for one whose bytes are others."""
    missing = []
    for name, expected in (task.kept or {"files": {}})["files"].items():
        path = task.out.parent / name
        if not path.is_file():
            missing.append(name.removeprefix(f"{FILES}/"))
        elif path.stat().st_size != expected["bytes"] or sha256_file(path) != expected["sha256"]:
            raise ValueError(
                f"{path}: its bytes are not those that {task.out} keeps (SHA-256 {expected['sha256']}); remove the file to"
                " fetch it again; to train on a version of your own, name that file as the source"
            )
    return missing


def _check_kept(task: Task, commit: str, remote: dict[str, Remote]) -> None:
    """Refuse what differs from the kept manifest: another commit, or other bytes. It says what has changed."""
    if task.kept is None:
        return
    changed = []
    for name, expected in task.kept["files"].items():
        there = remote.get(name.removeprefix(f"{FILES}/"))
        if there is None or there.size != expected["bytes"] or there.sha256 not in (None, expected["sha256"]):
            changed.append(name.removeprefix(f"{FILES}/"))
    if task.kept["commit"] != commit:
        what = f"changed or gone: {', '.join(changed)}" if changed else "the data files have not changed"
        raise ValueError(
            f"{task.source.text}: revision '{task.revision}' is commit {commit} now, {task.out} keeps {task.kept['commit']}"
            f" ({what}); set `revision: {task.kept['commit']}` to stay, or `revision: {commit}` to accept the new one"
        )
    if changed:
        raise _other_bytes(task, changed)


def _other_bytes(task: Task, names: list[str]) -> ValueError:
    """The error of a hub that gives other bytes for the same commit."""
    listed = ", ".join(str(task.files / name) for name in names)
    return ValueError(
        f"{task.source.text}: the hub has other bytes for {', '.join(names)} than {task.out} keeps, though the commit is the"
        f" same; to accept them remove {task.out} and {listed}"
    )


def _is_standing(task: Task, name: str, remote: Remote, commit: str) -> bool:
    """Whether a file is in its place already. Raises ValueError for a foreign one: it is not overwritten."""
    path = task.files / name
    if remote.is_copied_in(path):
        return True
    before = task.old.get("files", {}).get(f"{FILES}/{name}", {})
    if path.exists() and (task.old.get("commit") == BY_HAND or sha256_file(path) != before.get("sha256")):
        raise ValueError(f"{path}: its bytes are not those of commit {commit}; move it away and fetch again")
    return False


def _bring(task: Task, commit: str, files: dict[str, Remote], progress: Progress) -> dict[str, Any]:
    """Download what is not there, all of it before the first file takes its place; the manifest."""
    wanted = {name: remote for name, remote in files.items() if not _is_standing(task, name, remote, commit)}
    if wanted:
        download(task.source.repository, commit, wanted, task.incoming, progress)
        # Of some files the hub does not tell the SHA-256 beforehand.
        kept = (task.kept or {"files": {}})["files"]
        for name in wanted:
            if f"{FILES}/{name}" in kept and sha256_file(task.incoming / name) != kept[f"{FILES}/{name}"]["sha256"]:
                raise _other_bytes(task, [name])
        task.moving.touch()
    for name in wanted:
        (task.files / name).parent.mkdir(parents=True, exist_ok=True)
        fsync_path(task.incoming / name)
        (task.incoming / name).replace(task.files / name)
        fsync_path((task.files / name).parent)
    described = {
        f"{FILES}/{name}": {"bytes": remote.size, "sha256": remote.sha256 or sha256_file(task.files / name)}
        for name, remote in sorted(files.items())
    }
    manifest = task.write(commit, described)
    shutil.rmtree(task.incoming, ignore_errors=True)
    return manifest


def _how_to_place(task: Task, names: list[str]) -> str:
    """Which files to get and where to put them when the hub cannot be used."""
    address = f"{page(task.source.repository)}/tree/{task.revision}"
    names = names or [task.source.file]
    if names == [""]:
        asked = ":".join(task.source.parts) or "train"
        return f"place the data files of '{asked}', and no others, from {address} in {task.files}/, under the same paths"
    listed = ", ".join(str(task.files / name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"place {listed}{more}, from the same paths of {address}"


def _check_kind(name: str) -> None:
    """Refuse a file that nothing reads, before it comes."""
    if not name.endswith(ARCHIVE):
        kind_of(Path(name))


def _from_hand(task: Task, missing: list[str], names: list[str], fault: UnavailableError) -> dict[str, Any]:
    """The manifest of files that are there although the hub is not. Raises ValueError that says what to place where."""
    refusal = f"{task.source.text}: {fault}; {_how_to_place(task, missing or names)}, then run the same command again"
    if task.kept and not missing:
        LOG.warning("%s: %s; the files are those that %s keeps", task.source.text, fault, task.out)
        return task.kept
    if task.kept or task.moving.exists():
        raise ValueError(f"{refusal} (after an interrupted download remove {task.incoming} too)")
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
    for name in chosen:
        _check_kind(name)
    LOG.warning("%s: %s; taking what was placed by hand: %s", task.source.text, fault, ", ".join(chosen))
    return task.write(BY_HAND, describe_files(task.out.parent, [f"{FILES}/{name}" for name in chosen]))


def make(text: str, revision: str, out: Path, progress: Progress = None) -> dict[str, Any]:
    """Have the files of an hf: name beside the manifest `out`, at the commit the manifest keeps; returns the manifest.

    Raises ValueError for what differs from the kept manifest, and, when the hub cannot be used and no files were placed by
    hand, with the files to get and their places.
    """
    task = Task(parse(text), revision, out, read_json(out) if out.is_file() else {})
    missing, names = _missing(task), []
    if task.kept and not missing and task.kept["commit"] in (BY_HAND, revision):
        return task.kept
    if task.kept and task.kept["commit"] == BY_HAND:
        raise ValueError(f"{task.files / missing[0]}: missing; place it there again, or remove {out} to ask the hub for it")
    try:
        commit, remote = look_up(task.source.repository, revision)
        _check_kept(task, commit, remote)
        card = task.incoming / CARD
        if not task.source.file and CARD in remote:
            download(task.source.repository, commit, {CARD: remote[CARD]}, task.incoming)
        names = choose(task.source, sorted(remote), card.read_text(encoding="utf-8") if card.is_file() else "")
        for name in names:
            _check_kind(name)
        return _bring(task, commit, {name: remote[name] for name in names}, progress)
    except UnavailableError as fault:
        return _from_hand(task, missing, names, fault)


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
    check_files(path.parent, manifest["files"], path)
    return [path.parent / file for file in sorted(manifest["files"])], manifest
