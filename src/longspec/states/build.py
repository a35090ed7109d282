"""Builds one shard of stored states, part by part: a part that is whole stays, the others are computed and written.

    rows-000064-000127.safetensors    tensors [rows, S, ...] of rows 64 to 127; there as soon as all of them are

The target does not wait for the disk: a thread writes its results.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longspec.atomic_files import describe_files, new_file, read_json_object, write_manifest
from longspec.distributed import Ranks, log
from longspec.lease import acquire
from longspec.process_group import of_first_rank
from longspec.states.compute import Computation, Computed, shared
from longspec.states.declaration import Declaration, RowSource
from longspec.states.stored_states import SHARD, part_name

PART_BYTES = 128 * 2**20  # of one file, at least one row
METADATA = "states"  # one key: safetensors writes several in any order
PROGRESS = 30.0  # seconds between two lines


class ShardWriter:
    """The files of a shard on rank 0, which alone writes. files, left_out: what shard.json says of the whole parts."""

    def __init__(self, out: Path, declaration: Declaration, rows: range, check: Callable[[], None] = lambda: None) -> None:
        """Begin a shard; check: does not return when another job writes here."""
        self.out, self.declaration, self.rows, self.check = out, declaration, rows, check
        self.part_rows = max(1, PART_BYTES // declaration.row_bytes)
        self.parts = [rows[start : start + self.part_rows] for start in range(0, len(rows), self.part_rows)]
        self.files: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self._in_work: dict[int, dict[str, Tensor]] = {}  # rows of one part

    def find_missing(self) -> set[int]:
        """Return the rows that are to be computed: parts that earlier builders have left whole are kept, all others removed.

        Raises ValueError when the disk has no room for them.
        """
        names, listed = set(map(part_name, self.parts)), {}
        with suppress(ValueError):  # no shard is finished here, or its manifest is damaged
            listed = read_json_object(self.out / SHARD).get("files", {})
        for path in sorted(self.out.glob("*rows-*")):
            left_out = left_out_of(path, self.declaration) if path.name in names else None
            found = describe_files(self.out, [path.name])
            if left_out is None or listed.get(path.name, found[path.name]) != found[path.name]:
                path.unlink()
            else:
                self.files |= found
                self.left_out |= left_out
        missing = {row for part in self.parts if part_name(part) not in self.files for row in part}
        if missing:
            (self.out / SHARD).unlink(missing_ok=True)
        needed, free = len(missing) * self.declaration.row_bytes, shutil.disk_usage(self.out).free
        if needed > free:
            raise ValueError(
                f"{self.out}: the states of the rows that are missing need {needed} bytes, {free} are free there; make room, "
                "or put the folder on another disk"
            )
        there, size = len(self.rows) - len(missing), self.declaration.row_bytes
        log(f"{self.out}: {there} of {len(self.rows)} rows are there; {size} bytes a row")
        return missing

    def write(self, rows: Sequence[int], computed: Sequence[Computed]) -> None:
        """Take the missing ones of `rows`, which come in ascending order."""
        places = [(each, place) for each in computed for place in range(len(next(iter(each.tensors.values()))))]
        for row, (each, place) in zip(rows, places, strict=False):
            part = self.parts[(row - self.rows.start) // self.part_rows]
            if part_name(part) not in self.files:
                self._in_work[row] = self._finite(row, each, place)
                if row == part[-1]:
                    self._write_part(part)

    def _finite(self, row: int, computed: Computed, place: int) -> dict[str, Tensor]:
        """Return a row as it is stored: zeros where it is left out."""
        tensors = computed.row(place)
        if not_finite := computed.not_finite(place):
            reason = f"not finite: {', '.join(not_finite)}"
            log(f"WARNING row {row}: {reason}; it is left out of training")
            self.left_out[str(row)] = reason
            return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        return tensors

    def _write_part(self, part: range) -> None:
        name, rows = part_name(part), [self._in_work[row] for row in part]
        left_out = {row: why for row, why in self.left_out.items() if int(row) in part}
        content = {"declaration": self.declaration.hash, "left_out": left_out}
        tensors = {tensor: torch.stack([row[tensor] for row in rows]) for tensor in rows[0]}
        with new_file(self.out / name) as beside:
            beside.write_bytes(save(tensors, {METADATA: json.dumps(content)}))
            self.check()
        self.files |= describe_files(self.out, [name])
        self._in_work.clear()

    def finish(self, more: dict[str, Any]) -> Path:
        """Write the manifest of the shard, all parts being whole; return its path. more: for it."""
        content: dict[str, Any] = {"declaration": self.declaration.plain(), "hash": self.declaration.hash}
        content |= {"first": self.rows.start, "rows": len(self.rows), "part_rows": self.part_rows}
        content |= {"files": self.files, "left_out": self.left_out}
        content |= {"bytes": sum(file["bytes"] for file in self.files.values())} | more
        self.check()
        write_manifest(self.out / SHARD, self.out, content)
        return self.out / SHARD


def left_out_of(path: Path, declaration: Declaration) -> dict[str, str] | None:
    """Return the rows that a part leaves out, with the reasons; None for a file that is torn or holds other states."""
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads(file.metadata()[METADATA])
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None
    found: dict[str, str] = content["left_out"]
    return found if content["declaration"] == declaration.hash else None


def batches_of(rows: range, missing: set[int], step: int) -> list[list[int]]:
    """Return the batches of a shard's rows that hold a missing one.

    They are the same whatever is missing, so that the states are the same to the bit, however often a builder was killed.
    """
    batches = [list(rows[start : start + step]) for start in range(0, len(rows), step)]
    return [batch for batch in batches if not missing.isdisjoint(batch)]


def build(
    out: Path,
    source: RowSource,
    declaration: Declaration,
    rows: range,
    load: Callable[[], Computation],
    micro_batch: int,
    ranks: Ranks,
    more: dict[str, Any],
) -> Path:
    """Build a shard in a folder: all ranks call it, rank 0 writes; returns the path of shard.json.

    load: makes the computation, asked only where rows are missing; more: for shard.json. Raises ValueError when another
    builder writes here, or the disk has no room.
    """
    writer = lease = None
    try:
        if ranks.is_main:
            lease = acquire(out)
            writer = ShardWriter(out, declaration, rows, lease.check)
        missing = of_first_rank(writer.find_missing if writer else set, ranks)
        if missing:
            batches = batches_of(rows, missing, micro_batch * ranks.world_size)
            _compute_and_write(batches, source, load(), writer)
        return writer.finish(more) if writer is not None else out / SHARD
    finally:
        if lease is not None:
            lease.release()


def _compute_and_write(
    batches: Sequence[list[int]], source: RowSource, computation: Computation, writer: ShardWriter | None
) -> None:
    """Compute batches of rows on all ranks; on rank 0 a thread writes one while the next is computed."""
    ranks, began, writing = computation.ranks, time.monotonic(), None
    said, done, number = began, 0, sum(map(len, batches))
    with ThreadPoolExecutor(1) as pool:
        for rows in batches:
            parts = computation.gathered(computation.of(source.batch(shared(rows, ranks)[ranks.rank])))
            if writer is None:
                continue
            if writing is not None:
                writing.result()  # raises what went wrong there
            writing = pool.submit(writer.write, rows, parts)
            done += len(rows)
            if time.monotonic() - said > PROGRESS or done == number:
                said = time.monotonic()
                log(f"{done} of {number} rows, {done * source.sequence_length / (said - began):.0f} tokens/s")
        if writing is not None:
            writing.result()
