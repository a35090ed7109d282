"""Held-out text of the dataset that rows were packed from, laid out as the rows are."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from longspec.atomic_files import checked_file, read_json, sha256_file
from longspec.config import COLLATIONS
from longspec.data.chat.encoding import Encoder, load_tokenizer
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.pack.arrow_shards import PackedRows, Row


def held_out_rows(packed: PackedRows, count: int) -> list[Row]:
    """Return `count` rows of held-out records, spread evenly over these; fewer if there are fewer records.

    The manifests' own paths lead to them. Raises ValueError if one is missing or was made again, and if no record makes a row.
    """
    shard = packed.manifest["shards"][0]
    tokens = read_json(Path(shard["path"]))
    raw = Path(tokens["raw_manifest"])
    if sha256_file(Path(shard["path"])) != shard["sha256"] or not raw.is_file() or sha256_file(raw) != tokens["raw"]:
        raise ValueError(f"{raw}: is missing, or not what {packed.path.parent} was made of; make the packed rows again")
    path = checked_file(raw, "held_out.jsonl")
    encoder = Encoder(load_tokenizer(Path(tokens["tokenizer_manifest"]))[0])
    lines = path.read_bytes().splitlines()
    spread = np.linspace(0, len(lines) - 1, min(len(lines), count)).astype(int).tolist()
    found = (_row(encoder, json.loads(lines[place]), packed) for place in dict.fromkeys([*spread, *range(len(lines))]))
    rows = list(islice(filter(None, found), count))
    if not rows:
        raise ValueError(f"{path}: no record of it makes a row; raise data.{tokens['dataset']}.held_out")
    return rows


def _row(encoder: Encoder, record: dict[str, Any], packed: PackedRows) -> Row | None:
    """Return the beginning of a record as a row, filled up to a row's length.

    None if the chat template refuses it, as in training, or if the row would have no label.
    """
    try:
        made = encoder.documents(record)[-1]
    except LayoutError:
        return None
    length = min(packed.sequence_length, len(made.ids))
    input_ids_S = np.full(packed.sequence_length, packed.manifest["eos"], dtype=np.int32)
    loss_mask_S = np.zeros(packed.sequence_length, dtype=np.uint8)
    input_ids_S[:length] = made.ids[:length]
    loss_mask_S[1:length] = made.answer_mask[1:length] if COLLATIONS[packed.manifest["collation"]] else True
    positions_S = np.arange(packed.sequence_length, dtype=np.int32)
    return Row(input_ids_S, loss_mask_S, np.zeros_like(positions_S), positions_S, []) if loss_mask_S.any() else None
