"""Parquet as a dataset's source: what of its rows is read, rejected, left out, and what the rejects show of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspec import jsonl
from longspec.data import raw
from longspec.data.read.split_records import is_held_out

NOT_UTF8 = pa.array([b"b\xffd", b"good"]).view(pa.string())
# Columns of types that JSON has not, and others of which it cannot hold the first of two cells.
UNREAD: dict[str, pa.Array] = {
    "seen": pa.array([0, 1], pa.timestamp("ns")),
    "price": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
    "image": pa.array([{"bytes": b"\xff", "path": "p"}] * 2),
}
BROKEN: dict[str, pa.Array] = {
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


def test_what_json_cannot_hold_is_left_out_and_counted_by_column(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = make(tmp_path, {"text": ["a", "b"], "id": [1, 2], **UNREAD, **BROKEN})
    assert (manifest["records"]["train"], manifest["records"]["rejected"]) == (2, 0)
    good = {name: column[1].as_py() for name, column in BROKEN.items()}
    assert rows(tmp_path, "train") == [{"text": "a", "id": 1}, {"text": "b", "id": 2, **good}]
    for name in UNREAD | BROKEN:
        assert f"column {name} left out of {2 if name in UNREAD else 1} records" in caplog.text


def test_a_record_that_needs_such_a_cell_is_rejected_with_what_it_holds(tmp_path: Path) -> None:
    make(tmp_path, {"text": NOT_UTF8, "id": [1, 2]})
    assert [row["text"] for row in rows(tmp_path, "train")] == ["good"]
    [row] = rows(tmp_path, "rejects")
    assert (row["file"], row["line"]) == (str(tmp_path / "in.parquet"), 1)
    assert json.loads((tmp_path / "raw" / "rejects.raw").read_bytes()) == {"id": 1}


def test_what_is_held_out_follows_what_json_can_hold_of_a_row(tmp_path: Path) -> None:
    count = 400
    table = {
        "text": [f"row {n}" for n in range(count)],
        "id": list(range(count)),
        "score": [float("nan") if n % 3 else 0.5 for n in range(count)],
        "seen": pa.array(range(count), pa.timestamp("s")),
        "meta": [{"title": "t"}] * count,
    }
    make(tmp_path, table, held_out=0.2)
    kept = {row["id"] for row in rows(tmp_path, "held_out")}

    def key(n: int) -> bytes:
        row = {"id": n, "meta": {"title": "t"}, **({} if n % 3 else {"score": 0.5}), "text": f"row {n}"}
        return json.dumps(row).encode()

    assert kept == {n for n in range(count) if is_held_out(key(n), 0.2)}
    assert 40 < len(kept) < 120


def test_a_row_beyond_the_limit_is_told_and_its_neighbours_are_read(tmp_path: Path) -> None:
    texts, kinds = ["short", "x" * 30_000, "y" * 9_000, "short too"], pa.array(["k" * 9_000, "l", "l", "l"])
    table = {"text": texts, "kind": kinds.dictionary_encode()}
    manifest = make(tmp_path, table, max_line_mb=0.02)
    assert [row["text"] for row in rows(tmp_path, "train")] == [texts[0], texts[2], texts[3]]
    [row] = rows(tmp_path, "rejects")
    assert (row["line"], row["field"], row["reason"]) == (2, "row", "is longer than 0.02 MB (max_line_mb)")
    assert manifest["records"]["rejected"] == 1
