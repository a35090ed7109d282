"""Raw records: what is kept, held out, rejected and filtered, that the sum is what was read, and the rejects' bytes."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspec import jsonl
from longspec.atomic_files import check_files, describe_files, write_json
from longspec.data import raw
from longspec.data.read.split_records import is_held_out
from tests.refusals import Fact, check, refused

GOOD = [{"text": f"good {number}", "unread": "\ud83d"} for number in range(8)]
# Line, field, a fact of the reason.
BAD: list[tuple[bytes, str, Fact]] = [
    (b'{"text": "cut', "line", "valid JSON"),
    (b'["text"]', "line", "is list"),
    (b'{"text": "\xff\xfe"}', "line", "'utf-8' codec"),
    (b'{"text": "  "}', "text", "is empty"),
    (b'{"text": "a\\ud800b"}', "text", re.compile("surrogate .* 2$")),
    (b'{"text": "\xed\xa0\x80"}', "line", "'utf-8' codec"),
    (b'{"text": "t", "score": NaN}', "line", "holds NaN"),
    (b'{"text": "t", "score": -1e999}', "line", "holds -1e999"),
    (b'{"text": "%s"}' % (b"x" * 3000), "line", "0.002 MB"),
    (b"\xef\xbb\xbf{", "line", "valid JSON"),
    (b'{"text": "a", "text": "b"}', "line", "'text' twice"),
    (b'{"n": %s}' % (b"9" * 1990), "record", "(fields: n;"),
    (b"[" * 990 + b"]" * 990, "line", "nested"),
    (b'{"text": "t"} {"text": "t"}', "line", "Extra data"),
]
RAW = "raw/manifest.json"


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(jsonl.read(folder / f"{name}.jsonl"))


def holds(manifest: dict[str, Any], **records: int) -> bool:
    """Whether the manifest counts these records, no others, and loses none."""
    told = {name: count for name, count in manifest["records"].items() if count}
    parts = ("train", "held_out", "rejected", "filtered")
    return told == records and told["read"] + told.get("made", 0) == sum(told.get(part, 0) for part in parts)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_rejects_name_file_line_field_reason_and_hold_the_bytes(tmp_path: Path, end: bytes) -> None:
    source = tmp_path / "in.jsonl"
    lines = [json.dumps(record).encode() for record in GOOD] + [line for line, _, _ in BAD]
    random.Random(0).shuffle(lines)
    source.write_bytes(end.join([*lines, b""]))
    settings = {"source": str(source), "shards": 2, "held_out": 0, "max_rejected": 0.7, "max_line_mb": 0.002}
    manifest = raw.make("d", settings, tmp_path / RAW)
    assert holds(manifest, train=len(GOOD), rejected=len(BAD), read=len(lines))
    check_files(tmp_path / "raw", manifest["files"])
    assert sorted(map(str, GOOD)) == sorted(map(str, rows(tmp_path / "raw", "train")))
    rejects = {row["line"]: row for row in rows(tmp_path / "raw", "rejects")}
    originals = (tmp_path / "raw" / "rejects.raw").read_bytes()
    assert len(rejects) == len(BAD)
    for line, field, fact in BAD:
        row = rejects[lines.index(line) + 1]
        check(f"{row['file']}: {row['field']}: {row['reason']}", f"{source}: {field}:", fact)
        kept = line + end if len(line) < 2000 else b""  # nothing of the line that is too long
        assert originals[row["offset"] : row["offset"] + row["bytes"]] == kept


def test_corrected_originals_are_fed_back(tmp_path: Path) -> None:
    for name, lines in (("a", ['{"text": "1"}', '{"txt": "2"}', '{"txt": "3"']), ("b", ['{"txt": "4"}'])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))  # the last line has no end
    (tmp_path / "c.json").write_text(json.dumps([{"txt": "5"}], indent=1))  # a record of several lines
    settings = {"held_out": 0, "max_rejected": 1}
    raw.make("d", {"source": [f"{tmp_path}/{name}" for name in ("b.jsonl", "a.jsonl", "c.json")], **settings}, tmp_path / RAW)
    originals = (tmp_path / "raw" / "rejects.raw").read_bytes()
    assert originals == b'{"txt": "2"}\n{"txt": "3"\n{"txt": "4"}\n{   "txt": "5"  }\n'
    extents = [originals[row["offset"] :][: row["bytes"]] for row in rows(tmp_path / "raw", "rejects")]
    assert extents == [b'{"txt": "2"}\n', b'{"txt": "3"', b'{"txt": "4"}', b'{   "txt": "5"  }']
    (tmp_path / "again.jsonl").write_bytes(originals.replace(b"txt", b"text").replace(b'3"', b'3"}'))
    raw.make("e", {"source": str(tmp_path / "again.jsonl"), **settings}, tmp_path / "again" / "manifest.json")
    assert [row["text"] for row in rows(tmp_path / "again", "train")] == ["2", "3", "4", "5"]


def test_reasons_that_differ_in_numbers_count_as_one_and_stand_as_the_first(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    broken = [{"messages": [{"role": "user", "content": "u"}] * number + [3]} for number in range(5)]
    source.write_text("\n".join(json.dumps(record) for record in [*GOOD, *broken, {"text": ""}]))
    manifest = raw.make("d", {"source": str(source), "held_out": 0, "max_rejected": 0.5}, tmp_path / RAW)
    place = {"file": str(source)}
    assert manifest["rejects"] == [
        {"field": "messages[0]", "reason": "must be an object, is int", "count": 5, "line": 9, **place},
        {"field": "text", "reason": "is empty", "count": 1, "line": 14, **place},
    ]


def test_flattened_and_filtered_records_are_counted_and_siblings_stay_together(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    books = [{"book": n, "pages": [f"{n}/{page}" for page in range(1 + n % 4)] + [""] * (n % 3 == 0)} for n in range(300)]
    jsonl.write(source, [*books, {"book": 300, "pages": "all"}])
    steps: list[Any] = [
        {"filter": {"field": "book", "min": 10}},
        {"flatten": {"field": "pages"}},
        {"rename": {"pages": "text"}},
        {"filter": {"field": "text", "not_in": ["20/0", "21/0"]}},
    ]
    settings = {"source": str(source), "align": steps, "held_out": 0.2, "max_rejected": 0.2}
    manifest = raw.make("d", settings, tmp_path / RAW)
    train, held_out = rows(tmp_path / "raw", "train"), rows(tmp_path / "raw", "held_out")
    pages = sum(len(book["pages"]) for book in books[10:])
    empty = sum("" in book["pages"] for book in books[10:])
    counts = {"read": 301, "made": pages - 290, "filtered": 10 + 2, "rejected": empty + 1}
    assert holds(manifest, **counts, train=len(train), held_out=len(held_out))
    assert len(train) + len(held_out) == pages - empty - 2
    assert not {record["book"] for record in train} & {record["book"] for record in held_out}
    assert manifest["align"] == {
        "align[0].filter": {"records filtered out": 10},
        "align[1].flatten": {"lists flattened": 290, "records made": pages},
        "align[2].rename": {},
        "align[3].filter": {"records filtered out": 2},
    }
    originals = (tmp_path / "raw" / "rejects.raw").read_text().splitlines()
    lines = source.read_text().splitlines()
    assert originals == [lines[n] for n in range(10, 300) if "" in books[n]["pages"]] + [lines[300]]


def test_answers_to_one_question_are_held_out_together(tmp_path: Path) -> None:
    records = [{"meta": {"q": f"q{n}"}, "problem": f"q{n}", "qwq": f"a{k}"} for n in range(60) for k in range(4)]
    lines = [jsonl.encode(record) + "\n" for record in [*records, {"problem": "without", "qwq": "a"}]]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    both = []
    for by in ("", "meta.q"):
        settings = {"source": str(tmp_path / "in.jsonl"), "held_out": 0.3, "held_out_by": by, "max_rejected": 0.1}
        raw.make("d", settings, tmp_path / RAW)
        asked = [{row["problem"] for row in rows(tmp_path / "raw", part)} for part in ("train", "held_out")]
        both.append(len(asked[0] & asked[1]))
        assert len(asked[1]) > 5
    assert (both[0] > 20, both[1]) == (True, 0)
    [reject] = rows(tmp_path / "raw", "rejects")
    assert (reject["line"], reject["field"]) == (len(lines), "meta.q")


def test_held_out_share_follows_the_line_alone(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {n}"}) for n in range(2000)]
    kept: list[set[str]] = []
    for name, order in (("a", lines), ("b", lines[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(order))
        out = tmp_path / name / "manifest.json"
        raw.make(name, {"source": str(tmp_path / f"{name}.jsonl"), "held_out": 0.1}, out)
        kept.append({row["text"] for row in jsonl.read(tmp_path / name / "held_out.jsonl")})
    assert kept[0] == kept[1]
    assert 150 < len(kept[0]) < 250


def test_modules_held_out_once_are_held_out_everywhere(tmp_path: Path) -> None:
    paths: dict[str, set[str]] = {}
    for name, settings in (("all", {}), ("long", {"min_characters": 16000, "as": "code"})):
        raw.make(name, {"source": "stdlib", **settings}, tmp_path / name / "manifest.json")
        for part in ("train", "held_out"):
            found = rows(tmp_path / name, part)
            paths[f"{name}/{part}"] = {row["path"] for row in found}
            assert name == "all" or all(len(row["text"]) >= 16000 and row["source"] == "code" for row in found)
    assert paths["long/held_out"] < paths["all/held_out"]
    assert paths["long/train"] < paths["all/train"]
    assert not paths["all/train"] & paths["all/held_out"]
    everything = paths["all/train"] | paths["all/held_out"]
    assert {"argparse.py", "json/decoder.py"} <= everything
    assert not any(path.startswith(("test/", "site-packages/", "encodings/")) for path in everything)
    assert not {"token.py", "keyword.py", "html/entities.py", "stringprep.py"} & everything


@pytest.mark.parametrize(("rejected", "allowed", "passes"), [(1, 0.01, True), (2, 0.01, False)])
def test_more_rejects_than_allowed_fail_the_job(tmp_path: Path, rejected: int, allowed: float, passes: bool) -> None:
    """What is left tells of the faults, and without a manifest no later job goes on."""
    source, folder = tmp_path / "in.jsonl", tmp_path / "raw"
    settings = {"source": str(source), "held_out": 0, "max_rejected": allowed}
    source.write_text('{"text": ""}\n' * rejected + '{"text": "good"}\n' * (100 - rejected))
    write_json(tmp_path / RAW, {})  # of an earlier job
    if passes:
        assert holds(raw.make("d", settings, tmp_path / RAW), train=100 - rejected, read=100, rejected=rejected)
        return
    first = f"{rejected} x text: is empty (first: {source}, line 1)"
    with refused(f"data.d: {rejected} of 100 records", "data.d.max_rejected", first, folder / "rejects.jsonl"):
        raw.make("d", settings, tmp_path / RAW)
    assert not (tmp_path / RAW).exists()
    assert len(rows(folder, "rejects")) == rejected
    assert (folder / "rejects.raw").read_text() == '{"text": ""}\n' * rejected


@pytest.mark.parametrize(
    ("name", "content", "place", "fact"),
    [
        ("in.jsonl", '{"text": "x"}\n' * 3, "data.d: no record", "under data.d"),
        ("in.json", '[{"text": "x"}, {"text": "y"', "{}/in.json: record 2:", "jq"),
    ],
)
def test_nothing_to_train_on_and_a_cut_source_leave_no_manifest(
    tmp_path: Path, name: str, content: str, place: str, fact: str
) -> None:
    (tmp_path / name).write_text(content)
    write_json(tmp_path / RAW, {})  # of an earlier job
    steps = [{"filter": {"field": "text", "equals": "y"}}]
    with refused(place.format(tmp_path), fact):
        raw.make("d", {"source": str(tmp_path / name), "align": steps}, tmp_path / RAW)
    assert not (tmp_path / RAW).exists()


def test_files_of_the_hub_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("data.d.source: hf:o/d", "python -m longspec.data fetch --source hf:o/d --revision v1 --out "):
        raw.make("d", {"source": "hf:o/d", "revision": "v1"}, tmp_path / RAW)
    folder = Path("data/hub/d")
    (folder / "files").mkdir(parents=True)
    for name in ("b.jsonl", "a.json"):
        (folder / "files" / name).write_text(json.dumps({"text": name}) + "\n")
    files = describe_files(folder, ["files/b.jsonl", "files/a.json"])
    fetched = {"source": "hf:o/d", "revision": "main", "repository": "o/d", "commit": "c" * 40, "files": files}
    write_json(folder / "manifest.json", fetched)
    manifest = raw.make("d", {"source": "hf:o/d", "held_out": 0}, tmp_path / RAW)
    assert [record["text"] for record in rows(tmp_path / "raw", "train")] == ["a.json", "b.jsonl"]
    assert manifest["origin"] == {"repository": "o/d", "commit": "c" * 40}
    write_json(folder / "manifest.json", fetched | {"revision": "c" * 40})
    pinned = raw.make("d", {"source": "hf:o/d", "held_out": 0, "revision": "c" * 40}, tmp_path / RAW)
    assert pinned == manifest, "so that no finished stage is trained anew for it"
    write_json(folder / "manifest.json", fetched)
    with refused(f"{folder}/manifest.json: revision: is main", "data.d.revision is v1"):
        raw.make("d", {"source": "hf:o/d", "revision": "v1"}, tmp_path / RAW)
    (folder / "files/a.json").write_text("{}")
    with refused(f"{folder}/files/a.json", "python -m longspec.data fetch --source hf:o/d --revision main --out "):
        raw.make("d", {"source": "hf:o/d"}, tmp_path / RAW)


@pytest.mark.parametrize(
    ("settings", "key", "fact"),
    [
        ({"source": "stdlib", "min_chars": 3}, "min_chars", "known: "),
        ({"source": "stdlib", "align": []}, "align", "source stdlib; known: "),
        ({"source": "puzzles"}, "records", "given for"),
    ],
)
def test_settings_are_checked(tmp_path: Path, settings: dict[str, Any], key: str, fact: str) -> None:
    with refused(f"data.d.{key}:", fact):
        raw.make("d", settings, tmp_path / "raw" / "manifest.json")


NOT_UTF8 = pa.array([b"b\xffd", b"good"]).view(pa.string())
# Columns of types that JSON has not, and others of which it cannot hold the first of two cells.
UNREAD: dict[str, pa.Array] = {
    "seen": pa.array([0, 1], pa.timestamp("ns")),
    "price": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
    "until": pa.array([10**9] * 2, pa.int32()).cast(pa.date32()),  # beyond the years of datetime
}
IMAGE = pa.array([{"bytes": b"\xff", "path": "p"}] * 2)
BROKEN: dict[str, pa.Array] = {
    "score": pa.array([float("nan"), 0.5]),
    "scores": pa.array([[0.5, float("inf")], [0.5]]),
    "note": NOT_UTF8,
    "turns": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.StructArray.from_arrays([NOT_UTF8], ["role"])),
}


def make_parquet(folder: Path, table: dict[str, Any], **settings: Any) -> dict[str, Any]:
    pq.write_table(pa.table(table), folder / "in.parquet")
    whole = {"source": str(folder / "in.parquet"), "held_out": 0, "max_rejected": 1, **settings}
    return raw.make("d", whole, folder / "raw" / "manifest.json")


def test_what_json_cannot_hold_is_left_out_and_counted_by_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = make_parquet(tmp_path, {"text": ["a", "b"], "id": [1, 2], "image": IMAGE, **UNREAD, **BROKEN})
    assert (manifest["records"]["train"], manifest["records"]["rejected"]) == (2, 0)
    good = {name: column[1].as_py() for name, column in BROKEN.items()}
    image = {"image": {"path": "p"}}
    assert rows(tmp_path / "raw", "train") == [{"text": "a", "id": 1} | image, {"text": "b", "id": 2, **image, **good}]
    told = capsys.readouterr().out
    for name in ("image", *UNREAD, *BROKEN):
        assert f"column {name} left out of {1 if name in BROKEN else 2} records" in told


def test_messages_in_parquet_lose_their_times_and_the_fields_of_other_records_alone(tmp_path: Path) -> None:
    """Parquet has one type for all calls of a column, so that each call has every other tool's arguments, as nulls."""
    call = pa.struct({"name": pa.string(), "arguments": pa.struct({"city": pa.string(), "unit": pa.string()})})
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("us"), "tool_calls": pa.list_(call)})
    asked = {"role": "user", "content": "How warm?", "at": 1_700_000_000_000_000}
    told = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {"city": "Rome"}}]}
    make_parquet(
        tmp_path, {"conversation": pa.array([[asked, told]], pa.list_(turn)), "seen": pa.array([0], pa.timestamp("s"))}
    )
    [row] = rows(tmp_path / "raw", "train")
    assert row == {"conversation": [{"role": "user", "content": "How warm?"}, told]}


def test_a_record_that_needs_such_a_cell_is_rejected_with_what_it_holds(tmp_path: Path) -> None:
    make_parquet(tmp_path, {"text": NOT_UTF8, "id": [1, 2]})
    assert [row["text"] for row in rows(tmp_path / "raw", "train")] == ["good"]
    [row] = rows(tmp_path / "raw", "rejects")
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
    make_parquet(tmp_path, table, held_out=0.2)
    kept = {row["id"] for row in rows(tmp_path / "raw", "held_out")}

    def key(n: int) -> bytes:
        row = {"id": n, "meta": {"title": "t"}, **({} if n % 3 else {"score": 0.5}), "text": f"row {n}"}
        return json.dumps(row).encode()

    assert kept == {n for n in range(count) if is_held_out(key(n), 0.2)}
    assert 40 < len(kept) < 120


def test_a_row_beyond_the_limit_is_told_and_its_neighbours_are_read(tmp_path: Path) -> None:
    texts, kinds = ["short", "x" * 30_000, "y" * 9_000, "short too"], pa.array(["k" * 9_000, "l", "l", "l"])
    table = {"text": texts, "kind": kinds.dictionary_encode()}
    manifest = make_parquet(tmp_path, table, max_line_mb=0.02)
    assert [row["text"] for row in rows(tmp_path / "raw", "train")] == [texts[0], texts[2], texts[3]]
    [row] = rows(tmp_path / "raw", "rejects")
    assert (row["line"], row["field"], row["reason"]) == (2, "row", "is longer than 0.02 MB (max_line_mb)")
    assert manifest["records"]["rejected"] == 1
