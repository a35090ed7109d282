"""What a person is shown of rows and documents."""

import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longspec.atomic_files import read_json, write_json
from longspec.data import inspection, tokenize
from longspec.data.pack import packing
from tests.corpus import write_raw

END = "<|im_end|>"
RECORDS: list[dict[str, Any]] = [
    {"problem": "p0", "qwq": "the answer zero"},
    {"problem": "p1", "qwq": "answer [bold]one[/bold] \x1b[31m"},
    {"problem": "p2", "qwq": "word " * 200},
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tokenizer_manifest: Path) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    raw = write_raw(folder / "raw", RECORDS)
    tokens = [folder / "tokens" / f"{shard:03}.json" for shard in range(2)]
    for shard, path in enumerate(tokens):
        tokenize.make(raw, tokenizer_manifest, shard, 2, path)
    packing.make(tokens, 128, "longcot", "split", folder / "packed" / "manifest.json")
    return folder / "packed" / "manifest.json"


def shown(path: Path, row: int = 0, *, full: bool = True, **console: Any) -> str:
    """The output on a wide console."""
    what = inspection.open_manifest(path, row)
    out = Console(file=io.StringIO(), width=200, **console)
    inspection.show(what, inspection.load_tokenizer(what, None), full, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def rows(path: Path) -> range:
    return range(read_json(path)["rows"])


def test_trained_text_stands_between_marks(packed: Path) -> None:
    pages = [shown(packed, row) for row in rows(packed)]
    trained = [text for page in pages for text in re.findall(r"⟦([^⟧]*)⟧", page.split("⟦trained⟧")[1])]
    # The escape of a record is shown, not obeyed, and what looks like markup is text.
    assert f"the answer zero{END}" in trained
    assert f"answer [bold]one[/bold] ␛[31m{END}" in trained
    assert 190 < "".join(trained).count("word") < 200  # the first token of a further piece is no label
    assert not any("p1" in text for text in trained)
    assert sum("<|im_start|>user\np1" in page for page in pages) == 1


def test_every_document_names_its_record(packed: Path) -> None:
    train = packed.parents[1] / "raw/train.jsonl"
    lines: list[int] = []
    starts: dict[int, list[tuple[int, int]]] = {}
    for row in rows(packed):
        page = shown(packed, row)
        found = re.findall(r"document \d+: its tokens ([\d,]+) to ([\d,]+), .*\n(\S+) line (\d+)", page)
        for start, end, path, line in found:
            assert Path(path) == train
            lines.append(int(line))
            starts.setdefault(int(line), []).append((int(start.replace(",", "")), int(end.replace(",", ""))))
    assert set(lines) == {1, 2, 3}
    # The pieces of the long record cover it from its first token on.
    ends = sorted(starts[3])
    assert ends[0][0] == 0
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ends))


def test_colours_take_the_place_of_marks_on_a_terminal(packed: Path) -> None:
    page = shown(packed, 0, force_terminal=True, color_system="truecolor")
    assert "⟦" not in page
    assert "\x1b[1;32m" in page
    bare = shown(packed, 0, force_terminal=True, color_system="truecolor", no_color=True)
    assert "⟦trained⟧" in bare


def test_long_documents_are_shown_in_part(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "HEAD", 3)
    monkeypatch.setattr(inspection, "TAIL", 2)
    page = shown(packed, 0, full=False)
    assert re.search(r"… \d+ tokens left out, --full shows them …", page)
    assert len(page) < len(shown(packed, 0))


def test_histograms_count_everything(packed: Path) -> None:
    page = shown(packed, 0)
    lengths, fill = page.split("documents by length")[1].split("rows by how full they are")
    counted = r" ([\d,]+) +[\d.]+%"
    assert sum(int(count) for count in re.findall(counted, lengths)) == len(RECORDS)
    assert sum(int(count) for count in re.findall(counted, fill.split("row 0")[0])) == len(rows(packed))


def test_a_token_shard_is_shown_too(packed: Path) -> None:
    shard = packed.parents[1] / "tokens/000.json"
    page = shown(shard, 0)
    assert f"⟦the answer zero{END}⟧" in page
    assert "line 1" in page


def test_changed_records_are_told(packed: Path, tmp_path: Path) -> None:
    what = inspection.open_manifest(packed, 0)
    raw = Path(what.origin["raw_manifest"])
    before = raw.read_bytes()
    try:
        write_json(raw, read_json(raw) | {"name": "other"})
        assert "which is there no more as it was" in shown(packed, 0)
    finally:
        raw.write_bytes(before)


def test_refusals(packed: Path, tmp_path: Path, tokenizer_manifest: Path) -> None:
    with pytest.raises(ValueError, match=r"--row: must lie in 0\.\."):
        inspection.open_manifest(packed, 10**6)
    with pytest.raises(ValueError, match="no manifest of packed rows"):
        inspection.open_manifest(tokenizer_manifest, 0)
    what = inspection.open_manifest(packed, 0)
    with pytest.raises(ValueError, match="name the tokenizer's manifest with --tokenizer"):
        inspection.load_tokenizer(what, tmp_path / "none.json")
    what.origin["tokenizer"] = "another"
    with pytest.raises(ValueError, match="another tokenizer made these tokens"):
        inspection.load_tokenizer(what, tokenizer_manifest)


def test_the_verb(packed: Path) -> None:
    command = [sys.executable, "-m", "longspec.data", "inspect", str(packed), "--row", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "⟦trained⟧" in ran.stdout
    assert json.dumps(RECORDS[0]["qwq"])[1:-1] in ran.stdout or "word word" in ran.stdout
