"""Token shards and packed rows on the disk: Arrow IPC files, written in batches and read memory-mapped.

Suffixes: S tokens of a row, R rows, N tokens of several documents, D documents.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longspec.atomic_files import check_files, checked_manifest, read_json, sha256_file

ROWS = "rows.arrow"  # beside the manifest of a packed folder
DOCUMENT_STARTS, LENGTH, RECORDS, NUM_LABELS, PIECE_STARTS = range(2, 7)  # columns of packed rows, behind ids and mask
OPEN_BATCHES = 1024  # record batches of packed rows that stay open: some 40 KB each
TOKEN_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("answer_mask", pa.list_(pa.uint8())), ("record", pa.int64())])


def row_schema(sequence_length: int) -> pa.Schema:
    """Return the columns of packed rows."""
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), sequence_length)),
            ("loss_mask", pa.list_(pa.uint8(), sequence_length)),
            ("document_starts", pa.list_(pa.int32())),
            ("length", pa.int32()),
            ("records", pa.list_(pa.int64())),
            ("num_labels", pa.int32()),
            # Where each piece begins in its own document, in tokens: above 0 for a further piece of a cut document.
            ("piece_starts", pa.list_(pa.int64())),
        ]
    )


def view(array: pa.Array) -> NDArray[Any]:
    """Return the values of an array of numbers without nulls, not copied. `to_numpy` would import pandas for that: 40 MB."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)


def lists(lengths: Sequence[int] | NDArray[np.int64], values: pa.Array) -> pa.ListArray:
    """Return a list column, from the values of all lists in order and each list's length."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Write documents to a token shard, one record batch per call, and count them."""

    def __init__(self, path: Path) -> None:
        self.documents = self.tokens = self.answer_tokens = 0
        self._writer = pa.ipc.new_file(str(path), TOKEN_SCHEMA)

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, documents: list[tuple[NDArray[np.int32], NDArray[np.uint8]]], records: list[int]) -> None:
        """Add documents (ids [n], answer mask [n]). records: the byte in train.jsonl where each one's record begins."""
        lengths = [len(ids) for ids, _ in documents]
        ids_N = np.concatenate([ids for ids, _ in documents])
        mask_N = np.concatenate([mask for _, mask in documents])
        columns = [lists(lengths, pa.array(ids_N)), lists(lengths, pa.array(mask_N)), pa.array(records, pa.int64())]
        self._writer.write_batch(pa.record_batch(columns, schema=TOKEN_SCHEMA))
        self.documents += len(documents)
        self.tokens += len(ids_N)
        self.answer_tokens += int(mask_N.sum())


class TokenShards:
    """Number the documents of several token shards through; nothing is copied before it is asked for."""

    def __init__(self, manifest_paths: list[Path]) -> None:
        self.manifests = [checked_manifest(path) for path in manifest_paths]
        readers = [pa.ipc.open_file(pa.memory_map(str(path.with_suffix(".arrow")))) for path in manifest_paths]
        batches = [reader.get_batch(i) for reader in readers for i in range(reader.num_record_batches)]
        self._offsets = [view(batch.column(0).offsets) for batch in batches]
        # Views of the files, made once: making one takes longer than copying a short document.
        self._ids, self._masks = ([view(batch.column(i).values) for batch in batches] for i in (0, 1))
        none = np.zeros(0, dtype=np.int64)
        self._first = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        self.lengths_D = np.concatenate([none, *(np.diff(offsets) for offsets in self._offsets)])
        # The byte in train.jsonl where each document's record begins.
        self.records_D = np.concatenate([none, *(view(batch.column(2)) for batch in batches)])

    def document(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return ids [n] and answer mask [n] of a document: views of the file, read-only."""
        at = bisect_right(self._first, number) - 1
        place, offsets = number - self._first[at], self._offsets[at]
        window = slice(offsets[place], offsets[place + 1])
        return self._ids[at][window], self._masks[at][window]


@dataclass(frozen=True)
class Row:
    """Hold a packed row, copied from the file."""

    input_ids_S: NDArray[np.int32]
    loss_mask_S: NDArray[np.uint8]  # 1: this token is a label
    document_ids_S: NDArray[np.int32]  # 0, 1, ... in the row; -1: padding
    position_ids_S: NDArray[np.int32]  # from 0 in each document, and from 0 in the padding
    records: list[int]  # for each document: the byte in train.jsonl where its record begins


def stacked(rows: Sequence[Row], name: str) -> NDArray[np.int64]:
    """Return one field of all rows as an array, int64 [B, S]."""
    return np.stack([getattr(row, name) for row in rows]).astype(np.int64)


class PackedRows:
    """Hold the rows of a packed folder, memory-mapped. Raises ValueError if a file is missing, torn, changed, or another kind.

    Opening reads no more of a large file than of a small one, unless it was written after its manifest: record batches are
    opened when their rows are asked for.
    """

    def __init__(self, manifest_path: Path) -> None:
        manifest_path = Path(manifest_path)
        self.manifest: dict[str, Any] = read_json(manifest_path)
        for name in ("sequence_length", "rows", "tokenizer", "files"):
            if name not in self.manifest:
                raise ValueError(f"{manifest_path}: {name}: is missing; give the manifest of packed rows, of data/packed")
        self.data_hash = sha256_file(manifest_path)
        self.sequence_length = int(self.manifest["sequence_length"])
        check_files(manifest_path.parent, self.manifest["files"], manifest_path)
        self.path = manifest_path.parent / ROWS
        self._reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
        count = self._reader.num_record_batches
        self._batch = lru_cache(maxsize=OPEN_BATCHES)(self._reader.get_batch)
        # All batches but the last hold equally many rows.
        self._rows_of_batch = self._batch(0).num_rows if count else 1
        self._length = self._rows_of_batch * (count - 1) + self._batch(count - 1).num_rows if count else 0

    def __len__(self) -> int:
        return self._length

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all record batches in order; none stays open."""
        return (self._reader.get_batch(i) for i in range(self._reader.num_record_batches))

    def find(self, row: int) -> tuple[pa.RecordBatch, int]:
        """Return the record batch that holds a row, and the row's place in it. Raises IndexError for a row not there."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        at, place = divmod(row, self._rows_of_batch)
        return self._batch(at), place

    def __getitem__(self, row: int) -> Row:
        batch, place = self.find(int(row))
        length = self.sequence_length
        window = slice(place * length, (place + 1) * length)
        input_ids_S, loss_mask_S = (view(batch.column(i).values)[window].copy() for i in (0, 1))
        starts = view(batch.column(DOCUMENT_STARTS)[place].values)
        edges = np.append(starts, [batch.column(LENGTH)[place].as_py(), length])
        spans = np.diff(edges)
        document_ids_S = np.repeat(np.append(np.arange(len(starts)), -1), spans).astype(np.int32)
        position_ids_S = (np.arange(length) - np.repeat(edges[:-1], spans)).astype(np.int32)
        records = batch.column(RECORDS)[place].as_py()
        return Row(input_ids_S, loss_mask_S, document_ids_S, position_ids_S, records)


def count_labels(find: Callable[[int], tuple[pa.RecordBatch, int]], rows: Iterable[int]) -> int:
    """Return the number of labels in some rows. find: PackedRows.find, or one like it."""
    places = [find(int(row)) for row in rows]
    return sum(batch.column(NUM_LABELS)[place].as_py() for batch, place in places)
