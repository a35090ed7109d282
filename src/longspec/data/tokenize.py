"""One shard of a raw folder as token ids and answer masks, in Arrow: the `tokenize` verb."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from longspec.atomic_files import (
    checked_manifest,
    describe_files,
    new_file,
    remove_strays,
    sha256_file,
    sha256_text,
    write_manifest,
)
from longspec.data.chat import chat_template
from longspec.data.chat.encoding import Encoded, Encoder, load_tokenizer
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.layout_tally import REWRITE_COUNTS, UNLIKE_SERVED
from longspec.data.pack.arrow_shards import TokenWriter

# Records go to the tokenizer in groups of about this many bytes: enough to keep all its threads busy.
GROUP_BYTES = 1 << 20
# Share of records without a layout above which a dataset fails, if its settings do not set one.
MAX_SKIPPED = 0.01

Group = list[tuple[int, dict[str, Any]]]  # the byte where each record's line begins in its file, and the record


def _groups(path: Path, shard: int, num_shards: int) -> Iterator[Group]:
    """Yield the records whose lines begin in the shard's part of a file, in groups of bounded size; read nothing else."""
    size = path.stat().st_size
    place, end = size * shard // num_shards, size * (shard + 1) // num_shards
    group: Group = []
    group_bytes = 0
    with path.open("rb") as handle:
        if place:
            # A line that begins right at the border follows a line end, so the byte before the border is read too.
            handle.seek(place - 1)
            place += len(handle.readline()) - 1
        while place < end:
            line = handle.readline()
            group.append((place, json.loads(line)))
            place, group_bytes = place + len(line), group_bytes + len(line)
            if group_bytes >= GROUP_BYTES or place >= end:
                yield group
                group, group_bytes = [], 0


def _write(encoder: Encoder, groups: Iterator[Group], writer: TokenWriter) -> dict[str, Any]:
    """Write every record as documents, or skip it; return the counts for the manifest.

    Counts: skipped records by reason, with the byte of the first; documents laid out unlike served prompts. If a template
    rewrites what it laid out (layout.py), also a record's documents beyond the first, and its messages in no document.
    """
    skipped: dict[str, dict[str, int]] = {}
    further, left_out = REWRITE_COUNTS
    counts = Counter({UNLIKE_SERVED: 0})
    for group in tqdm(groups, unit="MB", disable=None):
        kept: list[tuple[int, Encoded]] = []
        planned = encoder.encode([encoder.plan(record) for _, record in group])
        for (place, _), documents in zip(group, planned, strict=True):
            if isinstance(documents, LayoutError):  # whichever message is the cause
                reason = re.sub(r"\[\d+\]", "[]", str(documents))
                skipped.setdefault(reason, {"count": 0, "first": place})["count"] += 1
                continue
            counts[further] += len(documents) - 1
            counts[UNLIKE_SERVED] += sum(not document.as_served for document in documents)
            counts[left_out] += sum(document.left_out for document in documents)
            kept += [(place, document) for document in documents]
        if kept:
            writer.write([(document.ids, document.answer_mask) for _, document in kept], [place for place, _ in kept])
    # Zeros are not written, so that manifests of data without such records, and what is made of them, stay as they were.
    told = {name: count for name, count in counts.items() if count or name == UNLIKE_SERVED}
    return {"skipped": {"count": sum(each["count"] for each in skipped.values()), "reasons": skipped}, **told}


def make(raw: Path, tokenizer_manifest: Path, shard: int, num_shards: int, out: Path) -> dict[str, Any]:
    """Write a token shard beside its manifest `out`; return the manifest.

    A shard is a range of the file's bytes; no other byte is read. Raises ValueError if files differ from the raw manifest, or
    if the answers are tokens of another tokenizer.
    """
    raw_manifest, (tokenizer, tokenizer_hash) = checked_manifest(raw), load_tokenizer(tokenizer_manifest)
    known_by = (tokenizer_hash, sha256_file(tokenizer_manifest))  # older answers hold the hash of the manifest's text
    if raw_manifest.get("answered_by", {}).get("tokenizer", tokenizer_hash) not in known_by:
        raise ValueError(
            f"{raw}: its answers are tokens of another tokenizer than {tokenizer_manifest}; give that of the target that "
            "answered, or name the records as a data set, whose answers are tokenized from their text"
        )
    train, arrow = raw.parent / "train.jsonl", out.with_suffix(".arrow")
    remove_strays(arrow)
    with new_file(arrow) as beside:
        with TokenWriter(beside) as writer:
            counts = _write(Encoder(tokenizer), _groups(train, shard, num_shards), writer)
        # An old manifest must not stand beside the new shard.
        out.unlink(missing_ok=True)
    counts["skipped"]["allowed"] = raw_manifest["settings"].get("max_rejected", MAX_SKIPPED)  # of all shards: pack checks it
    content = {
        "dataset": raw_manifest["name"],
        "raw": sha256_file(raw),
        "raw_manifest": str(raw),
        "raw_records": raw_manifest["records"],
        "shard": shard,
        "num_shards": num_shards,
        "documents": writer.documents,
        "tokens": writer.tokens,
        "answer_tokens": writer.answer_tokens,
        **counts,
        "eos": int(tokenizer.eos_token_id),
        "tokenizer": tokenizer_hash,
        "tokenizer_manifest": str(tokenizer_manifest),
        "template": sha256_text(chat_template.template_of(tokenizer)),
        "files": describe_files(out.parent, [arrow.name]),
    }
    return write_manifest(out, out.parent, content)
