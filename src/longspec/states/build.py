"""Builds one shard of stored states, part by part: a part that is whole stays, the others are computed and written.

    rows-000064-000127.safetensors    tensors [rows, S, ...] of rows 64 to 127; there as soon as all of them are

The target does not wait for the disk: a thread writes its results. Two builders of one folder write the same bytes.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longspec.atomic_files import describe_files, new_file, read_json_object, remove_strays, write_manifest
from longspec.distributed import log
from longspec.process_group import of_first_rank
from longspec.states.compute import Computation, shared
from longspec.states.declaration import Declaration
from longspec.states.stored_states import SHARD, part_name, parts_of

PART_BYTES = 128 * 2**20  # of one file, at least one row
METADATA = "states"  # one key: safetensors writes several in any order
PROGRESS = 30.0  # seconds between two lines


class ShardWriter:
    """The files of a shard on rank 0, which alone writes. files: what shard.json says of the whole parts."""

    def __init__(self, out: Path, declaration: Declaration, rows: range) -> None:
        self.out, self.declaration, self.rows = out, declaration, rows
        self.part_rows = max(1, PART_BYTES // declaration.row_bytes)
        self.parts = parts_of(rows, self.part_rows)
        self.files: dict[str, dict[str, Any]] = {}
        self.content: dict[str, Any] = {"declaration": declaration.hash, "left_out": {}}  # what a part says of itself
        self._in_work: list[dict[str, Tensor]] = []  # rows of one part

    def find_missing(self) -> set[int]:
        """Return the rows that are to be computed: parts that earlier builders have left whole are kept, all others removed."""
        self.out.mkdir(parents=True, exist_ok=True)
        names, listed = set(map(part_name, self.parts)), {}
        with suppress(ValueError):  # no shard is finished here, or its manifest is damaged
            listed = read_json_object(self.out / SHARD).get("files", {})
        remove_strays(*(self.out / name for name in names))
        for path in sorted(self.out.glob("rows-*")):
            found = describe_files(self.out, [path.name])
            if path.name in names and self._is_own(path) and listed.get(path.name, found[path.name]) == found[path.name]:
                self.files |= found
            else:
                path.unlink()
        missing = {row for part in self.parts if part_name(part) not in self.files for row in part}
        if missing:
            (self.out / SHARD).unlink(missing_ok=True)
        there, size = len(self.rows) - len(missing), self.declaration.row_bytes
        log(f"{self.out}: {there} of {len(self.rows)} rows are there; {size} bytes a row")
        return missing

    def _is_own(self, path: Path) -> bool:
        """Tell whether a file is whole and holds states of this declaration."""
        with suppress(SafetensorError, KeyError, TypeError, ValueError), safe_open(path, framework="pt") as file:
            return bool(json.loads(file.metadata()[METADATA]) == self.content)
        return False

    def write(self, rows: Sequence[int], computed: Sequence[dict[str, Tensor]]) -> None:
        """Take the missing ones of `rows`, which come in ascending order."""
        places = [(each, place) for each in computed for place in range(len(next(iter(each.values()))))]
        for row, (tensors, place) in zip(rows, places, strict=False):
            part = self.parts[(row - self.rows.start) // self.part_rows]
            if part_name(part) not in self.files:
                self._in_work.append({name: tensor[place].cpu() for name, tensor in tensors.items()})
                if row == part[-1]:
                    self._write_part(part_name(part))

    def _write_part(self, name: str) -> None:
        tensors = {tensor: torch.stack([row[tensor] for row in self._in_work]) for tensor in self._in_work[0]}
        with new_file(self.out / name) as beside:
            beside.write_bytes(save(tensors, {METADATA: json.dumps(self.content)}))
        self.files |= describe_files(self.out, [name])
        self._in_work.clear()

    def finish(self, more: dict[str, Any]) -> None:
        """Write the manifest of the shard, all parts being whole. more: for it."""
        content: dict[str, Any] = {"declaration": self.declaration.plain(), "hash": self.declaration.hash}
        content |= {"first": self.rows.start, "rows": len(self.rows), "part_rows": self.part_rows}
        content |= {"files": self.files, "left_out": {}, "bytes": sum(file["bytes"] for file in self.files.values())}
        write_manifest(self.out / SHARD, self.out, content | more)


def build(out: Path, computation: Computation, rows: range, more: dict[str, Any]) -> Path:
    """Build a shard in a folder: all ranks call it, rank 0 writes; returns the path of shard.json. more: for it.

    A batch has the same rows whatever is missing: the states are the same to the bit, however often a builder was killed.
    """
    ranks = computation.ranks
    writer = ShardWriter(out, computation.declaration, rows) if ranks.is_main else None
    missing = of_first_rank(writer.find_missing if writer else set, ranks)
    if missing:
        step = computation.runtime.micro_batch * ranks.world_size
        batches = [list(batch) for batch in parts_of(rows, step) if not missing.isdisjoint(batch)]
        _compute_and_write(batches, computation, writer)
    if writer is not None:
        writer.finish(more)
    return out / SHARD


def _compute_and_write(batches: Sequence[list[int]], computation: Computation, writer: ShardWriter | None) -> None:
    """Compute batches of rows on all ranks; on rank 0 a thread writes one while the next is computed."""
    ranks, began, writing = computation.ranks, time.monotonic(), None
    said, done, number = began, 0, sum(map(len, batches))
    with ThreadPoolExecutor(1) as pool:
        for rows in batches:
            parts = computation.gathered(computation.of(shared(rows, ranks)[ranks.rank]))
            if writer is None:
                continue
            if writing is not None:
                writing.result()  # raises what went wrong there
            writing = pool.submit(writer.write, rows, parts)
            done += len(rows)
            if time.monotonic() - said > PROGRESS or done == number:
                said = time.monotonic()
                log(f"{done} of {number} rows, {done * computation.source.sequence_length / (said - began):.0f} tokens/s")
        if writing is not None:
            writing.result()
