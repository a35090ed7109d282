"""Rows for a person to read: the `inspect` verb.

What is trained stands between ⟦ and ⟧, and special tokens between ‹ and ›: their names in a text that somebody typed are not
what a model takes for control. On a terminal both have a colour too.
"""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from longspec.atomic_files import read_json, sha256_file
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.chat.special_tokens import special_names
from longspec.data.layout_tally import REWRITE_COUNTS, unlike_served_warning
from longspec.data.pack.arrow_shards import DOCUMENT_STARTS, LENGTH, PIECE_STARTS, PackedRows
from longspec.shown import lines, one_line

TRAINED, UNTRAINED, FRAME = "bold green", "default", "cyan"
OPEN, CLOSE = "⟦", "⟧"
SPECIAL, SPECIAL_OPEN, SPECIAL_CLOSE = "reverse", "‹", "›"
# Marks in the text itself are shown by their code points, which sets ours apart from them.
TYPED = {ord(mark): f"<U+{ord(mark):04X}>" for mark in (OPEN, CLOSE, SPECIAL_OPEN, SPECIAL_CLOSE)}
HEAD, TAIL = 160, 80  # tokens of a document that are shown at its beginning and its end
BAR = 40  # characters of the longest bar


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _facts(manifest: dict[str, Any]) -> dict[str, str]:
    raw, trained = manifest["raw_records"], manifest["labels"] / manifest["tokens"]
    facts = {
        "documents": f"{manifest['documents']:,} in {manifest['tokens']:,} tokens",
        "rows": f"{manifest['rows']:,} of {manifest['sequence_length']:,} tokens, {manifest['padding_share']:.2%} padding",
        "trained": f"{manifest['labels']:,} tokens, {trained:.1%}, as {manifest['collation']} has it",
        "overlong": f"{manifest['overlong']}: {_count(manifest['pieces'], 'piece')}, "
        f"{_count(manifest['cut_tokens'], 'token')} cut",
        "records": f"{raw['read']:,} read, {raw['rejected']:,} rejected, {raw['train']:,} to train on, "
        f"{manifest['skipped']:,} without a layout",
    }
    if warning := unlike_served_warning(manifest):
        facts["WARNING"] = warning
    further, left_out = (manifest.get(name, 0) for name in REWRITE_COUNTS)
    if further or left_out:
        facts["turns"] = (
            f"{_count(further, 'document')} beyond one a record, where the chat template rewrites earlier messages; "
            f"{_count(left_out, 'message')} behind last answers left out"
        )
    return facts


def _tokenizer(origin: dict[str, Any], given: Path | None) -> Any:
    path = given or Path(origin["tokenizer_manifest"])
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name the tokenizer's manifest with --tokenizer")
    tokenizer, found = load_tokenizer(path)
    if found != origin["tokenizer"]:
        raise ValueError(f"{path}: another tokenizer made these tokens; name its manifest with --tokenizer")
    return tokenizer


def _origin_of(record: int, origin: dict[str, Any]) -> str:
    """Say where the record lies that begins at a byte of the training records."""
    raw = Path(origin["raw_manifest"])
    train = raw.parent / "train.jsonl"
    if not raw.is_file() or sha256_file(raw) != origin["raw"]:
        return f"byte {record:,} of {train}, which is there no more as it was"
    with train.open("rb") as lines_before:
        number = 1
        while lines_before.tell() < record:
            lines_before.readline()
            number += 1
    return f"{train} line {number:,}"


def _runs(ids: list[int], trained: list[int], full: bool) -> Iterator[tuple[bool | None, list[int]]]:
    """Stretches of tokens that are trained or not; (None, ...) holds the tokens that are left out."""
    hidden = range(0) if full or len(ids) <= HEAD + TAIL else range(HEAD, len(ids) - TAIL)
    kinds = [None if at in hidden else bool(is_trained) for at, is_trained in enumerate(trained)]
    for kind, run in groupby(zip(kinds, ids, strict=True), key=lambda each: each[0]):
        yield kind, [token for _, token in run]


def _decoded(ids: list[int], tokenizer: Any, special: set[int]) -> Iterator[tuple[bool, str]]:
    """The text of tokens; that of each special token by itself, with True."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before: list[int] = []
    for is_special, run in groupby(ids, key=special.__contains__):
        tokens = list(run)
        if is_special:
            yield from ((True, decode([token])) for token in tokens)
            before = tokens[-1:]
        else:  # with the token before it: some tokenizers drop the space that a text begins with
            yield False, decode([*before, *tokens]).removeprefix(decode(before))


def _text(ids: list[int], trained: list[int], tokenizer: Any, full: bool) -> Text:
    text, special = Text(), set(tokenizer.convert_tokens_to_ids(list(special_names(tokenizer))))
    for is_trained, run in _runs(ids, trained, full):
        if is_trained is None:
            text.append(f"\n … {len(run):,} tokens left out, --full shows them … \n", style="dim")
            continue
        style = TRAINED if is_trained else UNTRAINED
        text.append(OPEN if is_trained else "", style=style)
        for is_special, decoded in _decoded(run, tokenizer, special):
            shown_as = lines(decoded).translate(TYPED)
            if is_special:
                text.append(f"{SPECIAL_OPEN}{shown_as}{SPECIAL_CLOSE}", style=f"{style} {SPECIAL}")
            else:
                text.append(shown_as, style=style)
        text.append(CLOSE if is_trained else "", style=style)
    return text


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Rule(Text(text, style=FRAME), style=FRAME, align="left", characters="╌"))


def show(path: Path, number: int, tokenizer_manifest: Path | None, full: bool, console: Console) -> None:
    """Print one row of a packed folder, named by its manifest, with facts of all.

    tokenizer_manifest: where it lies elsewhere than the tokens' manifest says. Raises ValueError for a manifest of no packed
    rows, a number of no row, and a tokenizer that is missing or did not make the tokens.
    """
    rows = PackedRows(path)
    if not 0 <= number < len(rows):
        raise ValueError(f"--row: must lie in 0..{len(rows) - 1}, is {number}")
    manifest, row, (batch, at) = rows.manifest, rows[number], rows.find(number)
    begins, length, starts = (batch.column(each)[at].as_py() for each in (DOCUMENT_STARTS, LENGTH, PIECE_STARTS))
    origin = read_json(Path(manifest["shards"][0]["path"]))  # of the first token shard
    tokenizer = _tokenizer(origin, tokenizer_manifest)
    console.print(Rule(Text(one_line(f"{manifest['dataset']}, packed"), style="bold"), style=FRAME, align="left"))
    for name, fact in _facts(manifest).items():
        console.print(Text(f"{name:>10}  ", style=FRAME).append(one_line(fact), style="default"))
    console.print(Text("\ndocuments by length", style="bold"))
    lengths = sorted((int(below), count) for below, count in manifest["document_lengths"].items())
    most, mark = max((count for _, count in lengths), default=1), "█" if console.encoding.startswith("utf") else "#"
    for below, count in lengths:
        told = f"{f'{below // 2:,} to {below - 1:,} tokens':>32} {count:>12,} {count / manifest['documents']:>7.1%} "
        console.print(Text(told).append(mark * max(1, round(BAR * count / most)), style=FRAME))
    heading = f"row {number:,}: {_count(len(begins), 'document')}, {length:,} tokens, {int(row.loss_mask_S.sum()):,} trained"
    console.print()
    console.print(Rule(Text(heading, style="bold"), style=FRAME, align="left"))
    marks = (f"{OPEN}trained{CLOSE}", TRAINED), " and untrained text; ", (f"{SPECIAL_OPEN}special{SPECIAL_CLOSE}", SPECIAL)
    console.print(Text.assemble(*marks, " tokens by their names"))
    # A piece is a stretch of a document, or the whole of it; `start` is its place there.
    pieces = zip(begins, [*begins[1:], length], row.records, starts, strict=True)
    for place, (begin, end, record, start) in enumerate(pieces, 1):
        ids, trained = row.input_ids_S[begin:end].tolist(), row.loss_mask_S[begin:end].tolist()
        _title(console, f"document {place}: its tokens {start:,} to {start + end - begin - 1:,}, {sum(trained):,} trained")
        console.print(Text(one_line(_origin_of(record, origin)), style="dim"))
        console.print(_text(ids, trained, tokenizer, full), soft_wrap=True)
    if padding := rows.sequence_length - length:
        _title(console, f"padding: {_count(padding, 'token')}")
