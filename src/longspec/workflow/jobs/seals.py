"""Hashes of what jobs have written, taken as they end: what was torn, damaged or edited since is refused before it is read.

Snakemake looks at times. A damaged output is newer than before, so it would do again whatever reads it, with what it holds now.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import Any

from longspec.atomic_files import check_files, read_json_object, sha256_file

PLACE = Path(".snakemake/seals.jsonl")
LARGEST = 4 * 2**30  # bytes; a larger file has its hash in a manifest, and is read by its own job alone
HASHED_AGAIN = 64 * 2**20  # bytes; a larger file is hashed again when its time or its size is another


@dataclass
class Seals:
    """The seals of a folder's files: a line each time that a job has written one, of which the last counts."""

    place: Path = PLACE
    known: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.known = {}
        for line in self.place.read_bytes().splitlines() if self.place.exists() else []:
            try:
                seal = json.loads(line)
                self.known[seal["file"]] = seal
            except (ValueError, TypeError, KeyError):  # torn by the end of its process; a file without a seal is not checked
                continue

    def add(self, files: Iterable[str]) -> None:
        """Seal a job's outputs, which must all be there. Raises OSError when there is no room."""
        seals = [_seal(name) for name in files if Path(name).is_file() and Path(name).stat().st_size <= LARGEST]
        self.known |= {seal["file"]: seal for seal in seals}
        self.place.parent.mkdir(parents=True, exist_ok=True)
        with self.place.open("ab") as file:  # a line begins anew behind one that was torn
            file.write("".join(f"\n{json.dumps(seal)}" for seal in seals).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def check(self, jobs: Iterable[Iterable[str]]) -> None:
        """Hold the outputs of each of these jobs against their seals. Raises ValueError that names those that differ."""
        broken, remove = [], []
        for outputs in jobs:
            there = [name for name in outputs if Path(name).is_file()]
            differing = [name for name in there if name in self.known and not _is_whole(name, self.known[name])]
            broken += differing
            remove += there if differing else []
        if broken:
            raise ValueError(
                f"{', '.join(broken)}: not as written by its job any more: torn, damaged or edited; have it made again after: "
                f"{join(['rm', *remove])}"
            )


def check_described(outputs: Iterable[str]) -> None:
    """Hold the files that a provenance.json among a job's outputs lists against it: the tokenizer's, say, are no outputs.

    Raises ValueError, with what has the job run again, for one that is missing or another.
    """
    outputs = set(outputs)
    for name in outputs:
        path = Path(name)
        if path.name == "provenance.json" and path.is_file():
            listed = read_json_object(path).get("files", {})
            check_files(
                path.parent, {each: file for each, file in listed.items() if str(path.parent / each) not in outputs}, path
            )


def _seal(name: str) -> dict[str, Any]:
    found = Path(name).stat()
    return {"file": name, "bytes": found.st_size, "time": found.st_mtime_ns, "sha256": sha256_file(Path(name))}


def _is_whole(name: str, seal: dict[str, Any]) -> bool:
    found = Path(name).stat()
    if found.st_size != seal["bytes"]:
        return False
    unread = found.st_size > HASHED_AGAIN and found.st_mtime_ns == seal["time"]
    return unread or sha256_file(Path(name)) == seal["sha256"]
