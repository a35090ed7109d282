"""Packed rows of one length from all token shards of a dataset: the `pack` verb.

Only the lengths of the documents are held in memory; their tokens are copied from one memory-mapped file to the next.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longspec.atomic_files import describe_files, new_file, remove_strays, sha256_file, write_manifest
from longspec.data import Progress
from longspec.data.layout_tally import REWRITE_COUNTS, UNLIKE_SERVED
from longspec.data.pack.arrow_shards import NUM_LABELS, ROWS, TokenShards, lists, row_schema, view
from longspec.data.pack.bin_packing import SHORTEST, Placed, histogram, place

COLLATIONS = {"base": False, "long-nomask": False, "long": True, "longcot": True}  # whether only answers are trained
BATCH_TOKENS = 1 << 20  # of a record batch


def _row_batch(shards: TokenShards, placed: Placed, rows: range, shape: tuple[int, int], answers_only: bool) -> pa.RecordBatch:
    """Some rows as a record batch; `shape`: a row's length and the token that fills it up. P: pieces, T: tokens of all rows."""
    sequence_length, eos = shape
    first, last = placed.edges_R1[rows.start], placed.edges_R1[rows.stop]
    pieces, counts_R = placed.pieces, np.diff(placed.edges_R1[rows.start : rows.stop + 1])
    document_P, start_P, length_P = (each[first:last] for each in (pieces.document_P, pieces.start_P, pieces.length_P))
    row_P = np.repeat(np.arange(len(rows)), counts_R)
    used_R = np.bincount(row_P, weights=length_P).astype(np.int64)
    # Where each piece begins in its row: what stands before it in all rows, less what stands before its row.
    begin_P = np.cumsum(length_P) - length_P - np.repeat(np.cumsum(used_R) - used_R, counts_R)
    place_P = row_P * sequence_length + begin_P
    ids_T = np.full(len(rows) * sequence_length, eos, dtype=np.int32)
    mask_T = np.zeros(len(ids_T), dtype=np.uint8)
    for number, start, length, at in zip(*(each.tolist() for each in (document_P, start_P, length_P, place_P)), strict=True):
        ids, answer_mask = shards.document(number)
        ids_T[at : at + length] = ids[start : start + length]
        mask_T[at : at + length] = answer_mask[start : start + length] if answers_only else 1
    mask_T[place_P] = 0  # nothing precedes these that could predict them
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(ids_T), sequence_length),
        pa.FixedSizeListArray.from_arrays(pa.array(mask_T), sequence_length),
        lists(counts_R, pa.array(begin_P, pa.int32())),
        pa.array(used_R, pa.int32()),
        lists(counts_R, pa.array(shards.records_D[document_P], pa.int64())),
        pa.array(mask_T.reshape(len(rows), sequence_length).sum(axis=1, dtype=np.int32)),
        lists(counts_R, pa.array(start_P, pa.int64())),
    ]
    return pa.record_batch(columns, schema=row_schema(sequence_length))


def _check_shards(shards: TokenShards, paths: list[Path]) -> None:
    """Every shard of one dataset, each once, and every record in it. Raises ValueError otherwise."""
    for key in ("dataset", "raw", "tokenizer", "template", "num_shards"):
        values = [manifest[key] for manifest in shards.manifests]
        for path, value in zip(paths, values, strict=True):
            if value != values[0]:
                raise ValueError(f"{path}: its {key} differs from that of {paths[0]}; tokenize all shards from the same files")
    found = sorted(manifest["shard"] for manifest in shards.manifests)
    if found != list(range(shards.manifests[0]["num_shards"])):
        raise ValueError(f"--tokens: shards {found} of {shards.manifests[0]['num_shards']}; give each shard once")
    further = sum(manifest.get("further_documents", 0) for manifest in shards.manifests)
    records = sum(manifest["documents"] + manifest["skipped"]["count"] for manifest in shards.manifests) - further
    wanted = shards.manifests[0]["raw_records"]["train"]
    if records != wanted:
        raise ValueError(f"{paths[0]}: {records} records in all shards, the raw manifest counts {wanted}; tokenize again")
    skipped, most = (sum(m["skipped"]["count"] for m in shards.manifests), shards.manifests[0]["skipped"]["allowed"])
    if skipped > most * wanted:
        raise ValueError(
            f"{paths[0].parent}: {skipped} of {wanted} records have no layout (the shards' manifests hold the reasons), more "
            f"than the share {most} that max_rejected allows; filter or rewrite them with `align`, or raise max_rejected"
        )


def _describe_shards(shards: TokenShards, paths: list[Path]) -> dict[str, Any]:
    manifests = shards.manifests
    keys = ("shard", "documents", "tokens")
    rows = [
        {"path": str(path), "sha256": sha256_file(path)} | {key: manifest[key] for key in keys}
        for path, manifest in zip(paths, manifests, strict=True)
    ]
    beyond = {name: sum(manifest.get(name, 0) for manifest in manifests) for name in (*REWRITE_COUNTS, UNLIKE_SERVED)}
    return {
        "shards": rows,
        "skipped": sum(manifest["skipped"]["count"] for manifest in manifests),
        **{name: count for name, count in beyond.items() if count},
        "raw_records": manifests[0]["raw_records"],
        "tokenizer": manifests[0]["tokenizer"],
        "template": manifests[0]["template"],
        "eos": manifests[0]["eos"],
    }


def _write(shards: TokenShards, placed: Placed, recipe: dict[str, Any], out: Path, progress: Progress) -> int:
    """Write rows.arrow beside `out`; the number of labels in it."""
    labels, length = 0, recipe["sequence_length"]
    shape, step = (length, shards.manifests[0]["eos"]), max(1, BATCH_TOKENS // length)
    with new_file(out.parent / ROWS) as beside:
        with pa.ipc.new_file(str(beside), row_schema(length)) as writer:
            for start in range(0, placed.rows, step):
                rows = range(start, min(placed.rows, start + step))
                batch = _row_batch(shards, placed, rows, shape, COLLATIONS[recipe["collation"]])
                writer.write_batch(batch)
                shards.release()
                labels += int(view(batch.column(NUM_LABELS)).sum())
                if progress:
                    progress(len(rows))
        # An old manifest must not stand beside the new rows.
        out.unlink(missing_ok=True)
    return labels


def make(
    tokens: list[Path], sequence_length: int, collation: str, overlong: str, out: Path, progress: Progress = None
) -> dict[str, Any]:
    """Write rows.arrow beside the manifest `out`; returns the manifest. Raises ValueError when there is no row."""
    if collation not in COLLATIONS:
        raise ValueError(f"data.collation: {collation!r} is unknown; choose one of {', '.join(COLLATIONS)}")
    if sequence_length < SHORTEST:
        raise ValueError(f"data.sequence_length: must be {SHORTEST} or more, is {sequence_length}")
    shards = TokenShards(tokens)
    _check_shards(shards, tokens)
    placed = place(shards.lengths_D, sequence_length, overlong)
    if not placed.rows:
        raise ValueError(f"{tokens[0]}: no document of {SHORTEST} tokens or more to pack; look at the raw records")
    remove_strays(out.parent / ROWS, out)
    recipe = {"sequence_length": sequence_length, "collation": collation, "overlong": overlong}
    labels = _write(shards, placed, recipe, out, progress)
    packed = int(placed.pieces.length_P.sum())
    manifest = {
        "dataset": shards.manifests[0]["dataset"],
        **recipe,
        "rows": placed.rows,
        "documents": len(shards.lengths_D),
        "pieces": len(placed.pieces.length_P),
        "tokens": packed,
        "cut_tokens": placed.pieces.cut_tokens,
        "padding_share": 1 - packed / (placed.rows * sequence_length),
        "labels": labels,
        "document_lengths": histogram(shards.lengths_D),
        "files": describe_files(out.parent, [ROWS]),
        **_describe_shards(shards, tokens),
    }
    write_manifest(out, out.parent, manifest)
    return manifest
