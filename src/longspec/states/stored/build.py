"""Builds one shard of stored states: whatever of it is whole stays, the rest is computed, written and checked.

The target never waits: rows are read ahead of it, and results are written behind it, by a thread each.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from longspec.atomic_files import read_json, sha256_file, write_json
from longspec.distributed import Ranks, log
from longspec.lease import acquire
from longspec.states.stored.chunk import LEFT_OUT, ROW, SUMS, ChunkWriter, Layout
from longspec.states.stored.compute import Computation, Encoded, shared
from longspec.states.stored.declaration import Declaration
from longspec.states.stored.manifest import SHARD
from longspec.states.stored.rows import RowBatch, RowSource
from longspec.states.stored.sample import differences, sampled

Alone = tuple[Encoded, Tensor]  # a row's states computed by itself, and which of its tokens [S] are text
CHUNK_BYTES = 128 * 2**20  # of one file, at least one row
WAITING = 2  # batches that wait to be written, at most
TELL = 30.0  # seconds between two lines of progress
BYTES_OF_LINES = 64  # a row and tensor in the two files of lines, at most


class ShardWriter:
    """The files of a shard on rank 0, which alone writes."""

    def __init__(self, out: Path, declaration: Declaration, rows: range, check: Callable[[], None] = lambda: None) -> None:
        self.out, self.declaration, self.rows = out, declaration, rows
        per_chunk = max(1, CHUNK_BYTES // declaration.row_bytes)
        firsts = range(rows.start, rows.stop, per_chunk)
        layouts = [Layout(declaration, first, min(per_chunk, rows.stop - first)) for first in firsts]
        self.chunks = [ChunkWriter(out, layout, check) for layout in layouts]

        self._open: ChunkWriter | None = None
        self._changed = False  # whether anything was written
        self.missing: set[int] = set()

    def find(self) -> set[int]:
        """Take over what is whole; the rows that are missing. Files of other states are removed."""
        names = {chunk.layout.name for chunk in self.chunks}
        for path in self.out.glob("rows-*"):
            if path.name.split(".")[0] not in names:
                path.unlink()
        for chunk in self.chunks:
            chunk.find()
        self.missing = {row for chunk in self.chunks for row in chunk.missing}
        return set(self.missing)

    def refuse_without_disk(self) -> None:
        """Raise ValueError when the disk has no room for what is to be written; a chunk in work has its share already."""
        needed = 0
        for chunk in self.chunks:
            there = next((file.stat().st_blocks * 512 for file in (chunk.part, chunk.whole) if file.exists()), 0)
            if not chunk.is_done():
                needed += max(0, chunk.layout.bytes - there) if chunk.missing else 0
                needed += chunk.layout.count * len(chunk.layout.sizes) * BYTES_OF_LINES
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise ValueError(
                f"{self.out}: the states of the rows that are missing need {needed} bytes, {free} are free there; make room, "
                "or put the folder on another disk"
            )

    def write(self, rows: Sequence[int], parts: Sequence[Encoded], again: dict[int, Alone]) -> None:
        """Write the states of the missing ones of `rows`. parts: of all, in order; again: of some, each computed alone."""
        places = [(part, place) for part in parts for place in range(len(next(iter(part.tensors.values()))))]
        for part in (*parts, *(each for each, _ in again.values())):
            part.wait()
        for row, (part, place) in zip(rows, places, strict=False):
            if row not in self.missing:
                continue
            chunk = self._chunk_of(row)
            reason = part.reason(place)
            if reason is not None:
                line = chunk.layout.left_out(row, reason)
                log(f"WARNING row {row}: {reason}; it is left out of training")
            else:
                line = chunk.write(row, part.row(place))
                if row in again:
                    self._compare(chunk, line, again[row])
            chunk.count(line)
            self.missing.discard(row)
            if not chunk.missing:
                chunk.finish()
                self._open = None

    def _chunk_of(self, row: int) -> ChunkWriter:
        """The chunk of a row, in work; rows come in ascending order."""
        if self._open is None or row not in self._open.layout.rows:
            self._open = self.chunks[(row - self.rows.start) // self.chunks[0].layout.count]
            self._open.open()
            self._changed = True
        return self._open

    def _compare(self, chunk: ChunkWriter, line: dict[str, Any], again: Alone) -> None:
        computed, is_text_S = again
        wrong = differences(self.declaration, chunk.read_back(line), computed.row(0), is_text_S)
        if wrong:
            raise ValueError(
                f"{chunk.part}: row {line[ROW]}: computed again alone it differs in {'; '.join(wrong)}: its states hang on the "
                "rows beside it; set runtime.micro_batch to 1, or recipe.precision to fp32"
            )

    def finish(self, more: dict[str, Any]) -> Path:
        """Complete chunks whose rows were all there but not their last file; write the manifest of the shard, and its path."""
        for chunk in self.chunks:
            if not chunk.is_done():
                chunk.open()
                chunk.finish()
                self._changed = True
        left_out = {str(row): line[LEFT_OUT] for chunk in self.chunks for row, line in chunk.lines.items() if LEFT_OUT in line}
        chunks = [
            {
                "name": chunk.layout.name,
                "first": chunk.layout.first,
                "rows": chunk.layout.count,
                "sha256": sha256_file(self.out / (chunk.layout.name + SUMS)),
            }
            for chunk in self.chunks
        ]
        content: dict[str, Any] = {"declaration": self.declaration.plain(), "hash": self.declaration.hash, "chunks": chunks}
        content |= {"first": self.rows.start, "rows": len(self.rows), "left_out": left_out}
        content |= {"bytes": sum(chunk.layout.bytes for chunk in self.chunks)} | more
        path = self.out / SHARD
        # Written anew with the same content, too: by its time a job that failed for what is mended may start again.
        if self._changed or not path.is_file() or _readable(path) != content:
            write_json(path, content)
        return path

    def close(self) -> None:
        """Let go of a chunk in work."""
        if self._open is not None:
            self._open.close()


def _readable(path: Path) -> Any:
    """The content of a JSON file, None for a damaged one."""
    try:
        return read_json(path)
    except ValueError:
        return None


def _ahead(batches: Sequence[list[int]], load: Callable[[list[int]], Any]) -> Iterator[tuple[list[int], Any]]:
    """Each batch with what is loaded of it, the next one being loaded meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        coming = [pool.submit(load, batch) for batch in batches[:1]]
        for number, batch in enumerate(batches):
            loaded = coming.pop().result()
            coming += [pool.submit(load, following) for following in batches[number + 1 : number + 2]]
            yield batch, loaded


def batches_of(rows: range, missing: set[int], step: int) -> list[list[int]]:
    """Batches of a shard's rows that hold a missing one.

    They are the same whatever is missing, so that the states are the same to the bit, however often a builder was killed.
    """
    batches = [list(rows[start : start + step]) for start in range(0, len(rows), step)]
    return [batch for batch in batches if not missing.isdisjoint(batch)]


def computed_rows(
    batches: Sequence[list[int]], source: RowSource, computation: Computation, sample: set[int]
) -> Iterator[tuple[list[int], list[Encoded], dict[int, Alone]]]:
    """Batches of rows: their numbers, their states by ranks, and those of the sampled ones computed alone."""
    ranks = computation.ranks

    def load(rows: list[int]) -> tuple[RowBatch, dict[int, RowBatch]]:
        own = shared(rows, ranks)[ranks.rank]
        return source.batch(own), {row: source.batch([row]) for row in rows if row in sample}

    for rows, (batch, alone) in _ahead(batches, load):
        parts = computation.gathered(*computation.of(batch))
        again = {row: computation.of(each) for row, each in alone.items()}  # on every rank: a partitioned target needs all
        on_host = {row: (computation.on_host(*each), alone[row].is_text_BS[0]) for row, each in again.items() if ranks.is_main}
        yield rows, parts, on_host


def build(
    out: Path,
    source: RowSource,
    declaration: Declaration,
    rows: range,
    load: Callable[[], Computation],
    micro_batch: int,
    ranks: Ranks,
    told: dict[str, Any],
) -> Path:
    """Build a shard in a folder: all ranks call it, rank 0 writes; returns the path of shard.json.

    load: makes the computation, asked only where rows are missing; told: more for shard.json. Raises ValueError when another
    builder writes here, the disk has no room, or a sampled row differs when it is computed again.
    """
    writer = lease = None
    missing: set[int] = set()
    try:
        if ranks.is_main:
            lease = acquire(out)
            writer = ShardWriter(out, declaration, rows, lease.check)
            missing = writer.find()
            if missing or not all(chunk.is_done() for chunk in writer.chunks):
                (out / SHARD).unlink(missing_ok=True)
            writer.refuse_without_disk()
            log(f"{out}: {len(rows) - len(missing)} of {len(rows)} rows are there; {declaration.row_bytes} bytes a row")
        if ranks.world_size > 1:
            box = [missing]
            dist.broadcast_object_list(box, src=0)
            missing = box[0]
        if missing:
            batches = batches_of(rows, missing, micro_batch * ranks.world_size)
            of_batches = computed_rows(batches, source, load(), sampled(rows, declaration) & missing)
            _run(of_batches, sum(map(len, batches)), writer, declaration.sequence_length)
        return writer.finish(told) if writer is not None else out / SHARD
    finally:
        if writer is not None:
            writer.close()
        if lease is not None:
            lease.release()


def _run(
    batches: Iterator[tuple[list[int], list[Encoded], dict[int, Alone]]],
    number: int,
    writer: ShardWriter | None,
    sequence_length: int,
) -> None:
    """Take the batches, of `number` rows, as they come; on rank 0 a thread writes them."""
    began = told = time.monotonic()
    done, writing = 0, deque[Future[None]]()
    with ThreadPoolExecutor(1) as pool:
        for rows, parts, again in batches:
            done += len(rows)
            if writer is None:
                continue
            writing.append(pool.submit(writer.write, rows, parts, again))
            if len(writing) > WAITING or writing[0].done():
                writing.popleft().result()  # raises what went wrong there
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                log(f"{done} of {number} rows, {done * sequence_length / (told - began):.0f} tokens/s")
        for each in writing:
            each.result()
    if writer is not None:
        seconds = time.monotonic() - began
        log(f"computed {done} rows in {seconds:.1f} s, {done * sequence_length / seconds:.0f} tokens/s")
