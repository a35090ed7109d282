"""Parquet as a dataset's source: what of its rows is read, rejected, left out, and what the rejects show of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspec import jsonl
from longspec.data import raw
from longspec.data.align import pipeline
from longspec.data.read import source_files
from longspec.data.read.items import Item, Note

NOT_UTF8 = pa.array([b"b\xffd", b"good"]).view(pa.string())
# Columns that JSON cannot hold, of two rows; in the second row NaN and the text are good.
BEYOND: dict[str, pa.Array] = {
    "seen": pa.array([0, 1], pa.timestamp("ns")),
    "day": pa.array([0, 1], pa.date32()),
    "price": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
    "image": pa.array([{"bytes": b"\xff", "path": "p"}] * 2),
    "blob": pa.array([b"abc", b"\xff"]),
    "score": pa.array([float("nan"), 0.5]),
    "scores": pa.array([[0.5, float("inf")], [0.5]]),
    "note": NOT_UTF8,
    "turns": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.StructArray.from_arrays([NOT_UTF8], ["role"])),
}
SETTINGS: dict[str, Any] = {"held_out": 0, "max_rejected": 1}


def make(folder: Path, table: dict[str, Any], **settings: Any) -> dict[str, Any]:
    pq.write_table(pa.table(table), folder / "in.parquet")
    whole = {"source": str(folder / "in.parquet"), **SETTINGS, **settings}
    return raw.make("d", whole, folder / "raw" / "manifest.json")


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(jsonl.read(folder / "raw" / f"{name}.jsonl"))


def test_columns_that_nothing_asks_for_reject_no_row(tmp_path: Path) -> None:
    """Each is noted once, however many of its cells are left out."""
    manifest = make(tmp_path, {"text": ["a", "b"], "id": [1, 2], **BEYOND})
    assert (manifest["records"]["train"], manifest["records"]["rejected"]) == (2, 0)
    made = rows(tmp_path, "train")
    assert made[0] == {"text": "a", "id": 1}
    assert {"text": "b", "id": 2}.items() <= made[1].items()
    assert sorted(note["reason"].split()[1].rstrip(":") for note in manifest["notes"]) == sorted(BEYOND)


def test_rows_of_which_no_column_is_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": pa.array([b"a", b"b", b"c"])}), path)
    *items, note = source_files.read(path, 1000, {"text"})
    assert [item.record for item in items if isinstance(item, Item)] == [{}] * 3
    assert isinstance(note, Note)


@pytest.mark.parametrize("name", BEYOND)
def test_of_a_column_that_an_aligner_asks_for_it_does(tmp_path: Path, name: str) -> None:
    """A row is a record where its cell is good; what of a rejected row is no JSON can be seen in rejects.raw."""
    column = pa.concat_arrays([BEYOND[name], pa.nulls(1, BEYOND[name].type)])
    manifest = make(tmp_path, {"text": ["a", "b", "c"], name: column}, align=[{"select": ["text", name]}])
    counts = manifest["records"]
    assert counts["read"] == 3 == counts["train"] + counts["rejected"]
    assert rows(tmp_path, "train")[-1] == {"text": "c", name: None}
    assert counts["rejected"] == (1 if name in ("score", "scores", "note", "turns") else 2)
    reject, original = rows(tmp_path, "rejects")[0], (tmp_path / "raw" / "rejects.raw").read_bytes()
    assert (reject["file"], reject["line"], reject["field"]) == (str(tmp_path / "in.parquet"), 1, name)
    seen = json.loads(original[reject["offset"] :][: reject["bytes"]])
    assert seen["text"] == "a"
    expected = {
        "seen": "1970-01-01 00:00:00",
        "day": "1970-01-01",
        "price": "1.00",
        "image": {"bytes": "\\xff", "path": "p"},
        "blob": "abc",
        "scores": [0.5, float("inf")],
        "note": None,
        "turns": None,
    }
    assert seen[name] == expected[name] if name in expected else np.isnan(seen[name])


def test_text_that_is_bytes_is_rejected_as_that(tmp_path: Path) -> None:
    make(tmp_path, {"text": pa.array([b"abc", None]), "target": ["t", "t"]})
    [row] = rows(tmp_path, "rejects")
    assert (row["line"], row["field"], row["reason"]) == (1, "text", "must be text, is bytes")
    assert json.loads((tmp_path / "raw" / "rejects.raw").read_text()) == {"target": "t", "text": "abc"}


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{"filter": {"field": "seen", "present": True}}, {"drop": ["seen", "score"]}],
        [{"compose": {"to": "text", "template": "{text} {meta.title}"}}, {"drop": ["meta", "score"]}],
    ],
)
def test_what_is_held_out_does_not_hang_on_the_aligners(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    """Two datasets of one file hold out the same rows, whichever columns each asks for."""
    count = 400
    table = {
        "text": [f"row {n}" for n in range(count)],
        "id": list(range(count)),
        "score": [float("nan") if n % 3 else 0.5 for n in range(count)],
        "seen": pa.array(range(count), pa.timestamp("s")),
        "meta": [{"title": "t"}] * count,
    }
    make(tmp_path, table, held_out=0.2, align=steps)
    kept = {row["id"] for row in rows(tmp_path, "held_out")}

    # By the row as JSON, what JSON cannot hold left out: as it was decided when all of a row was always read.
    def key(n: int) -> bytes:
        row = {"id": n, "meta": {"title": "t"}, **({} if n % 3 else {"score": 0.5}), "text": f"row {n}"}
        return json.dumps(row).encode()

    from longspec.data.read.split_records import is_held_out

    assert kept == {n for n in range(count) if is_held_out(key(n), 0.2)}
    assert 40 < len(kept) < 120


@pytest.mark.parametrize("written", ["plain", "dictionary"])
def test_a_row_beyond_the_limit_is_told_and_its_neighbours_are_read(tmp_path: Path, written: str) -> None:
    texts, kinds = ["short", "x" * 30_000, "y" * 9_000, "short too"], pa.array(["k" * 9_000, "l", "l", "l"])
    table = {"text": texts, "kind": kinds.dictionary_encode() if written == "dictionary" else kinds}
    manifest = make(tmp_path, table, max_line_mb=0.02)
    assert [row["text"] for row in rows(tmp_path, "train")] == [texts[0], texts[2], texts[3]]
    [row] = rows(tmp_path, "rejects")
    assert (row["line"], row["field"], row["reason"]) == (2, "row", "holds more than 0.02 MB (max_line_mb)")
    # No part of the row, which fed back would be taken for the whole.
    told = json.loads((tmp_path / "raw" / "rejects.raw").read_text())
    assert (told["file"], told["row"]) == (str(tmp_path / "in.parquet"), 2)
    assert 30_000 <= told["bytes"]["text"] < 30_100
    assert manifest["records"]["rejected"] == 1


def test_a_column_that_is_not_asked_for_is_not_decoded(tmp_path: Path) -> None:
    """So that images beside a text cost neither memory nor count as part of the row."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "image": [b"x" * 3_000_000]}), path)
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    [item, note] = source_files.read(path, 1_000_000, {"text"})
    assert isinstance(item, Item)
    assert isinstance(note, Note)
    assert (item.record, item.error) == ({"text": "a"}, None)
    assert pool.max_memory() - before < 2_500_000
    [item] = source_files.read(path, 1_000_000)
    assert isinstance(item, Item)
    assert item.error is not None


STEPS: list[tuple[Any, set[str]]] = [
    ({"rename": {"a": "text"}}, {"a", "text"}),
    ({"select": ["a", "b"]}, {"a", "b"}),
    ({"drop": ["a"]}, set()),
    ({"add_id": {"prefix": "p"}}, {"id"}),
    ({"compose": {"to": "c", "template": "{meta.title}{{x}} {b}"}}, {"c", "meta.title", "meta", "b"}),
    ({"flatten": {"field": ["a", "b"]}}, {"a", "b"}),
    ({"alternate": {"field": "a"}}, {"a", "messages"}),
]


def test_what_each_aligner_asks_for() -> None:
    for step, fields in STEPS:
        assert pipeline.fields_read([step]) == fields
