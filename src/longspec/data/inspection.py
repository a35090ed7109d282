"""Rows for a person to read, with trained text between ⟦ and ⟧: the `inspect` verb."""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, sha256_file
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.layout_tally import REWRITE_COUNTS, unlike_served_warning
from longspec.data.pack.arrow_shards import DOCUMENT_STARTS, LENGTH, PIECE_STARTS, PackedRows
from longspec.shown import lines, one_line

TRAINED = "⟦{}⟧"


def _facts(manifest: dict[str, Any]) -> dict[str, str]:
    raw, trained = manifest["raw_records"], manifest["labels"] / manifest["tokens"]
    facts = {
        "documents": f"{manifest['documents']:,} in {manifest['tokens']:,} tokens",
        "rows": f"{manifest['rows']:,} of {manifest['sequence_length']:,} tokens, {manifest['padding_share']:.2%} padding",
        "trained": f"{manifest['labels']:,} tokens, {trained:.1%}, as {manifest['collation']} has it",
        "overlong": f"{manifest['overlong']}: {manifest['pieces']:,} pieces, {manifest['cut_tokens']:,} tokens cut",
        "records": f"{raw['read']:,} read, {raw['rejected']:,} rejected, {raw['train']:,} to train on, "
        f"{manifest['skipped']:,} without a layout",
    }
    further, left_out = (manifest.get(name, 0) for name in REWRITE_COUNTS)
    if further or left_out:
        facts["turns"] = (
            f"{further:,} documents beyond one a record, where the chat template rewrites earlier messages; "
            f"{left_out:,} messages behind last answers left out"
        )
    if warning := unlike_served_warning(manifest):
        facts["WARNING"] = warning
    lengths = sorted((int(below), count) for below, count in manifest["document_lengths"].items())
    return facts | {f"{below // 2:,} to {below - 1:,} tokens": f"{count:,} documents" for below, count in lengths}


def _origin_of(record: int, origin: dict[str, Any]) -> str:
    """Return where the record lies that begins at a byte of the training records."""
    raw = Path(origin["raw_manifest"])
    train = raw.parent / "train.jsonl"
    if not raw.is_file() or sha256_file(raw) != origin["raw"]:
        return f"byte {record:,} of {train}, which is there no more as it was"
    number = 1
    with train.open("rb") as lines_before:
        while lines_before.tell() < record:
            lines_before.readline()
            number += 1
    return f"{train} line {number:,}"


def _text(ids: list[int], trained: list[int], tokenizer: Any) -> str:
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text, before = "", list[int]()
    for is_trained, run in groupby(zip(trained, ids, strict=True), key=lambda each: each[0]):
        tokens = [token for _, token in run]
        # Decoded with the token before it: some tokenizers drop a text's first space.
        decoded = lines(decode([*before, *tokens]).removeprefix(decode(before)))
        text += TRAINED.format(decoded) if is_trained else decoded
        before = tokens[-1:]
    return text


def show(path: Path, number: int) -> None:
    """Print one row of a packed folder, named by its manifest, after facts of all rows.

    Raises ValueError if these are no packed rows, if there is no such row, and if another tokenizer made the tokens.
    """
    rows = PackedRows(path)
    if not 0 <= number < len(rows):
        raise ValueError(f"--row: must lie in 0..{len(rows) - 1}, is {number}")
    row, (batch, at) = rows[number], rows.find(number)
    begins, length, starts = (batch.column(each)[at].as_py() for each in (DOCUMENT_STARTS, LENGTH, PIECE_STARTS))
    origin = read_json(Path(rows.manifest["shards"][0]["path"]))  # of the first token shard
    tokenizer, found = load_tokenizer(Path(origin["tokenizer_manifest"]))
    if found != origin["tokenizer"]:
        raise ValueError(f"{origin['tokenizer_manifest']}: another tokenizer made these tokens; tokenize and pack again")
    print(one_line(f"{rows.manifest['dataset']}, packed"))
    for name, fact in _facts(rows.manifest).items():
        print(f"{name:>32}  {one_line(fact)}")
    print(f"\nrow {number:,}: {len(begins):,} documents, {length:,} tokens, {int(row.loss_mask_S.sum()):,} trained")
    print(f"{TRAINED.format('trained')} and untrained text")
    # A piece is a stretch of a document, or the whole of it; `start` is its place there.
    pieces = zip(begins, [*begins[1:], length], row.records, starts, strict=True)
    for place, (begin, end, record, start) in enumerate(pieces, 1):
        ids, trained = row.input_ids_S[begin:end].tolist(), row.loss_mask_S[begin:end].tolist()
        print(f"\ndocument {place}: its tokens {start:,} to {start + end - begin - 1:,}, {sum(trained):,} trained")
        print(one_line(_origin_of(record, origin)))
        print(_text(ids, trained, tokenizer))
    print(f"\npadding: {rows.sequence_length - length:,} tokens")
