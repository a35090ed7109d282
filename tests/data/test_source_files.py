"""Files of every kind: the same records from each, faults told one by one, and memory that does not follow the file."""

import gzip
import json
import tracemalloc
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspec.data.read import source_files
from tests.refusals import refused

LIMIT = 10_000
RECORDS = [
    {"text": 'quotes " and \\ and {braces} [brackets], commas', "n": 1},
    {"text": "zwölf Boxkämpfer 🎉\n\ttabs", "deep": {"a": [1, {"b": []}], "c": {}}},
    {"text": '\\"]}', "list": ["a,b", "]", "}", 3.5, None, True]},
    {"text": "x" * 5000},
    {"text": "", "e": "\\"},
]


def records_of(path: Path) -> list[Any]:
    return [item.record for item in source_files.read(path, LIMIT)]


def compressed(data: bytes, kind: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
PRETTY = json.dumps(RECORDS, indent=2).encode()
FILES: dict[str, bytes] = {
    "plain.jsonl": LINES,
    "unended.jsonl": LINES.rstrip(b"\n"),
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "lines.jsonl.gz": gzip.compress(LINES),
    "lines.jsonl.zst": compressed(LINES, "zstd"),
    "two-streams.jsonl.gz": gzip.compress(LINES[:100]) + gzip.compress(LINES[100:]),
    "two-frames.jsonl.zst": compressed(LINES[:100], "zstd") + compressed(LINES[100:], "zstd"),
    "lines.json": LINES,
    "lines.json.gz": gzip.compress(LINES),
    "array.json": json.dumps(RECORDS).encode(),
    "pretty.json": PRETTY,
    "bom.json": source_files.BOM + PRETTY,
    "pretty.json.zst": compressed(PRETTY, "zstd"),
    "array-of-lines.json": b"[\n" + b",\n".join(LINES.splitlines()) + b"\n]\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert records_of(tmp_path / name) == RECORDS


TEXTS = st.text('\\"{}[],: \nä🎉x', max_size=7)
SIMPLE = st.none() | st.booleans() | st.integers(-999, 999) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@given(values=st.lists(VALUES, max_size=5), indent=st.none() | st.just(1), ascii_alone=st.booleans())
def test_values_of_any_array_are_found(values: list[Any], indent: int | None, ascii_alone: bool) -> None:
    records = [{"v": value} for value in values]
    with NamedTemporaryFile(suffix=".json") as file:
        Path(file.name).write_bytes(json.dumps(records, indent=indent, ensure_ascii=ascii_alone).encode())
        assert records_of(Path(file.name)) == records


def test_only_what_is_longer_than_the_limit_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours are read."""
    monkeypatch.setattr(source_files, "PIECE", 3)
    lines = [b'{"t": "%s"}\n' % (b"x" * size) for size in (2, 1, 2, 30, 1, 30)]  # of 12, 11 and 40 bytes
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines).rstrip(b"\n"))
    (tmp_path / "a.json").write_bytes(b"[" + b",".join(lines) + b"]")
    for name, limit in (("a.jsonl", 11), ("a.json", 10)):
        found = [(item.original.strip(), item.error is None) for item in source_files.read(tmp_path / name, limit)]
        assert found == [(line.strip(), True) if len(line) <= 11 else (b"", False) for line in lines]


def test_values_of_an_array_that_are_no_records_are_told(tmp_path: Path) -> None:
    """Each alone, with its bytes, and their neighbours are read."""
    bad = [b"5", b'{"text": "\xff"}', b'{"text": NaN}', b'{"a": 1, "a": 2}', b"[" * 600 + b"]" * 600, b'"]\\","']
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b",".join(value + b' ,\n{"text": "good"}' for value in bad) + b"\n]")
    found = list(source_files.read(path, LIMIT))
    assert [item.original for item in found[::2] if item.error and item.error.field == "line"] == bad
    assert [(item.line, item.record) for item in found[1::2]] == [(2 * n, {"text": "good"}) for n in range(1, len(bad) + 1)]


def test_a_line_that_the_end_of_the_file_cuts_off_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES[:-9])
    *_, last = source_files.read(path, LIMIT)
    assert last.error.reason.endswith("the file ends in the middle of this line")
    assert last.original == LINES.splitlines()[-1][:-8]


def test_marks_line_ends_and_blank_lines_are_no_part_of_a_record(tmp_path: Path) -> None:
    """It is held out, or not, as without them."""
    path = tmp_path / "a.jsonl"
    mark = source_files.BOM
    path.write_bytes(mark + b'{"text": "1"}\r\n{"text": "2"}\n\n \t\r\n' + mark + b'{"text": "5"}\r\n\n')
    assert [(item.line, item.key) for item in source_files.read(path, LIMIT)] == [(n, b'{"text": "%d"}' % n) for n in (1, 2, 5)]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]", b"[ \n]\n"])
def test_a_file_without_records_is_told(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert records_of(tmp_path / "a.json") == []
    assert "a.json: holds no record" in capsys.readouterr().out


def twice() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), sink)
    return sink.getvalue().to_pybytes()


MANY = b"".join(b'{"text": "line %d of many"}\n' % number for number in range(20_000))
CORRUPT: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("a.jsonl.gz", gzip.compress(MANY)[:-20], ("Truncated",)),
    ("a.jsonl.gz", gzip.compress(MANY) + b"\0garbage", ("corrupt",)),
    ("a.jsonl.zst", compressed(MANY, "zstd")[:-20], ("Truncated",)),
    ("a.json.zst", MANY, ("corrupt",)),
    ("a.jsonl.gz", b"", ("is empty",)),
    ("a.json", PRETTY[:200], ("record 2:", "jq")),
    ("a.json", b'[{"a": "\\', ("record 1:", "jq")),
    ("a.json", b'[{"a": 1}, {"a": "b}, {}]', ("record 2:", "Unterminated string")),
    ("a.json", b'[{}, {"text": "y",}]', ("record 2:", "jq")),
    ("a.json", b'[{"a": 1} {"a": 2}]', ("record 1:", "a comma")),
    ("a.json", b'[{"a": 1},]', ("record 2:", "Expecting value")),
    ("a.json", b"[" * 10**5, ("record 1:", "recursion")),
    ("a.json", b'[{}]\n["text"]\n', ("array", ".jsonl")),
    ("a.parquet", b"PAR1 and then nothing PAR1", ("no whole Parquet file",)),
    ("a.parquet", twice(), ("twice: text, text",)),
]


@pytest.mark.parametrize(("name", "content", "told"), CORRUPT)
def test_a_file_with_an_unknown_number_of_records_missing_is_refused(
    tmp_path: Path, name: str, content: bytes, told: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(f"{tmp_path / name}:", *told):
        list(source_files.read(tmp_path / name, LIMIT))


def test_files_of_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.jsonl", "b/1.jsonl", "b/c/3.jsonl.gz", "a.parquet", "b/.2.jsonl.7.tmp", "b/.hidden.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert source_files.files_of("b/2.jsonl") == [Path("b/2.jsonl")]
    assert source_files.files_of("b/*.jsonl") == [Path("b/1.jsonl"), Path("b/2.jsonl")]
    assert source_files.files_of(f"{tmp_path}/b/**/*.jsonl*") == [
        tmp_path / f"b/{name}" for name in ("1.jsonl", "2.jsonl", "c/3.jsonl.gz")
    ]
    assert source_files.files_of(["b/2.jsonl", "b/2.*", "*.parquet"]) == [Path("a.parquet"), Path("b/2.jsonl")]
    (tmp_path / "b/notes.txt").touch()
    for source, *told in (
        ("no/such.jsonl", "no/such.jsonl:", "hf:<name>"),
        ("*.jsonl", "*.jsonl:", "hf:<name>"),
        ("b", "b:", "b/*.jsonl"),
        ("b/*", "b/notes.txt:", source_files.KNOWN),
    ):
        with refused(*told):
            source_files.files_of(source)


def test_a_20_mb_line_is_never_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.zst"
    path.write_bytes(compressed(b'{"text": "first"}\n{"text": ["' + b"x" * 20_000_000 + b'"]}\n{"text": "last"}', "zstd"))
    tracemalloc.start()
    first, long_one, last = source_files.read(path, 1_000_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (first.record, last.record) == ({"text": "first"}, {"text": "last"})
    assert long_one.error.reason == "is longer than 1 MB (max_line_mb)"
    assert most < 10_000_000
