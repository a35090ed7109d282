"""Rows of one length, packed from all token shards of a dataset: the `pack` verb.

Only the lengths of the documents are held in memory; their tokens are copied from one memory-mapped file to the next.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from longspec.atomic_files import describe_files, new_file, remove_strays, sha256_file, write_manifest
from longspec.config import COLLATIONS
from longspec.data.layout_tally import REWRITE_COUNTS, UNLIKE_SERVED
from longspec.data.pack.arrow_shards import NUM_LABELS, ROWS, TokenShards, lists, row_schema, view
from longspec.data.pack.bin_packing import SHORTEST, Pieces, histogram, place

BATCH_TOKENS = 1 << 20  # of a record batch
WITHOUT_LABELS = "rows_without_labels"  # of a manifest


def without_labels_warning(manifest: dict[str, Any]) -> str:
    """Return a warning of rows that are computed and train nothing; "" if they are a tenth or fewer."""
    empty, rows = manifest.get(WITHOUT_LABELS, 0), manifest["rows"]
    if 10 * empty <= rows:
        return ""
    return (
        f"{empty:,} of {rows:,} rows hold no trained token: their prompts are longer than a row. Take longer rows "
        "(recipe.data.sequence_length), or leave such records out by `align`"
    )


def _row_batch(shards: TokenShards, pieces: Pieces, edges_R1: NDArray[np.int64], manifest: dict[str, Any]) -> pa.RecordBatch:
    """Return rows as a record batch; row r holds pieces edges_R1[r] to edges_R1[r + 1]. P: pieces, T: tokens of all rows."""
    sequence_length, counts_R = manifest["sequence_length"], np.diff(edges_R1)
    answers_only = COLLATIONS[manifest["collation"]]
    here = slice(edges_R1[0], edges_R1[-1])
    document_P, start_P, length_P = pieces.document_P[here], pieces.start_P[here], pieces.length_P[here]
    row_P = np.repeat(np.arange(len(counts_R)), counts_R)
    used_R = np.bincount(row_P, weights=length_P).astype(np.int64)
    # Where each piece begins in its row: the tokens before it in all rows, less those before its row.
    begin_P = np.cumsum(length_P) - length_P - np.repeat(np.cumsum(used_R) - used_R, counts_R)
    place_P = row_P * sequence_length + begin_P
    ids_T = np.full(len(counts_R) * sequence_length, manifest["eos"], dtype=np.int32)
    mask_T = np.zeros(len(ids_T), dtype=np.uint8)
    for number, start, length, at in zip(*(each.tolist() for each in (document_P, start_P, length_P, place_P)), strict=True):
        ids, answer_mask = shards.document(number)
        ids_T[at : at + length] = ids[start : start + length]
        mask_T[at : at + length] = answer_mask[start : start + length] if answers_only else 1
    mask_T[place_P] = 0  # no token before these could predict them
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(ids_T), sequence_length),
        pa.FixedSizeListArray.from_arrays(pa.array(mask_T), sequence_length),
        lists(counts_R, pa.array(begin_P, pa.int32())),
        pa.array(used_R, pa.int32()),
        lists(counts_R, pa.array(shards.records_D[document_P], pa.int64())),
        pa.array(mask_T.reshape(len(counts_R), sequence_length).sum(axis=1, dtype=np.int32)),
        lists(counts_R, pa.array(start_P, pa.int64())),
    ]
    return pa.record_batch(columns, schema=row_schema(sequence_length))


def _check_shards(shards: TokenShards, paths: list[Path]) -> None:
    """Raise ValueError unless these are all shards of one dataset, each once, with enough records laid out."""
    for key in ("dataset", "raw", "tokenizer", "template", "num_shards"):
        values = [manifest[key] for manifest in shards.manifests]
        for path, value in zip(paths, values, strict=True):
            if value != values[0]:
                raise ValueError(f"{path}: its {key} differs from that of {paths[0]}; tokenize all shards from the same files")
    found = sorted(manifest["shard"] for manifest in shards.manifests)
    if found != list(range(shards.manifests[0]["num_shards"])):
        raise ValueError(f"--tokens: shards {found} of {shards.manifests[0]['num_shards']}; give each shard once")
    wanted, most = shards.manifests[0]["raw_records"]["train"], shards.manifests[0]["skipped"]["allowed"]
    skipped = sum(manifest["skipped"]["count"] for manifest in shards.manifests)
    if skipped > most * wanted:
        raise ValueError(
            f"{paths[0].parent}: {skipped} of {wanted} records have no layout (the shards' manifests hold the reasons), more "
            f"than the share {most} that max_rejected allows; filter or rewrite them with `align`, or raise max_rejected"
        )


def _describe_shards(shards: TokenShards, paths: list[Path]) -> dict[str, Any]:
    manifests = shards.manifests
    rows = [
        {"path": str(path), "sha256": sha256_file(path)} | {key: manifest[key] for key in ("shard", "documents", "tokens")}
        for path, manifest in zip(paths, manifests, strict=True)
    ]
    beyond = {name: sum(manifest.get(name, 0) for manifest in manifests) for name in (*REWRITE_COUNTS, UNLIKE_SERVED)}
    return {
        "shards": rows,
        "skipped": sum(manifest["skipped"]["count"] for manifest in manifests),
        **{name: count for name, count in beyond.items() if count},
        **{key: manifests[0][key] for key in ("dataset", "raw_records", "tokenizer", "template", "eos")},
    }


def make(tokens: list[Path], sequence_length: int, collation: str, overlong: str, out: Path) -> dict[str, Any]:
    """Write rows.arrow beside the manifest `out`; return the manifest. Raises ValueError if there is no row.

    collation, overlong: one of config.COLLATIONS, one of config.OVERLONG.
    """
    if sequence_length < SHORTEST:
        raise ValueError(f"--length: must be {SHORTEST} or more, is {sequence_length}")
    shards = TokenShards(tokens)
    _check_shards(shards, tokens)
    pieces, edges_R1 = place(shards.lengths_D, sequence_length, overlong)
    rows, labels, unlabelled, packed = len(edges_R1) - 1, 0, 0, int(pieces.length_P.sum())
    if not rows:
        raise ValueError(f"{tokens[0]}: no document of {SHORTEST} tokens or more to pack; look at the raw records")
    manifest = {"sequence_length": sequence_length, "collation": collation, "overlong": overlong}
    manifest |= _describe_shards(shards, tokens)
    step = max(1, BATCH_TOKENS // sequence_length)
    remove_strays(out.parent / ROWS)
    with new_file(out.parent / ROWS) as beside:
        with pa.ipc.new_file(str(beside), row_schema(sequence_length)) as writer:
            for start in tqdm(range(0, rows, step), disable=None):
                batch = _row_batch(shards, pieces, edges_R1[start : start + step + 1], manifest)
                writer.write_batch(batch)
                labels += int(view(batch.column(NUM_LABELS)).sum())
                unlabelled += int((view(batch.column(NUM_LABELS)) == 0).sum())
        # An old manifest must not stand beside the new rows.
        out.unlink(missing_ok=True)
    manifest |= {
        "rows": rows,
        "documents": len(shards.lengths_D),
        "pieces": len(pieces.length_P),
        "tokens": packed,
        "cut_tokens": pieces.cut_tokens,
        "padding_share": 1 - packed / (rows * sequence_length),
        "labels": labels,
        **({WITHOUT_LABELS: unlabelled} if unlabelled else {}),
        "document_lengths": histogram(shards.lengths_D),
        "files": describe_files(out.parent, [ROWS]),
    }
    return write_manifest(out, out.parent, manifest)
