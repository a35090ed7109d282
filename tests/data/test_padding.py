"""Padding on the demo's own kinds of data, at the length that stage 1 is published with."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from longspec.data import tokenize
from longspec.data.pack import packing
from longspec.demo import puzzles, stdlib
from tests.corpus import write_raw

SOURCES: dict[str, tuple[Any, int]] = {
    "stdlib": (lambda: stdlib.generate(0, None), 60),
    "stdlib-long": (lambda: stdlib.generate(16_000, "code"), 25),
    "puzzles": (lambda: puzzles.generate(400, seed=0), 400),
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_padding_is_below_two_percent(tmp_path: Path, tokenizer_manifest: Path, name: str) -> None:
    generate, count = SOURCES[name]
    records = (record for _, record in generate() if record is not None)  # None: filtered by a setting
    raw = write_raw(tmp_path / name, list(itertools.islice(records, count)))
    tokens = tmp_path / "tokens" / "000.json"
    tokenize.make(raw, tokenizer_manifest, 0, 1, tokens)
    manifest = packing.make([tokens], 1024, "base", "split", tmp_path / "packed" / "manifest.json")
    assert manifest["padding_share"] < 0.02
    assert manifest["padding_share"] == pytest.approx(1 - manifest["tokens"] / (manifest["rows"] * 1024))
    # At most the last token of each document is cut.
    assert manifest["cut_tokens"] <= manifest["documents"]
