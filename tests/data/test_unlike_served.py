"""Data laid out otherwise than the target is asked for answers: said where it is tokenized, planned, looked at and reported."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from longspec.atomic_files import read_json
from longspec.config import compose
from longspec.data import __main__ as verb
from longspec.data import inspection
from longspec.data.pack import packing
from longspec.draft_vocabulary import tokenizer_files
from longspec.report import tables
from longspec.target.fetch import write_manifest
from longspec.train.estimate import plan
from tests.data.families import byte_level, family
from tests.data.test_tokenize import make_raw

TOLD = (
    r"d: (\d+) of 20 documents are laid out otherwise than this target is asked .*data\.d\.regenerate in config/workflow\.yaml"
)


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    return byte_level()


def tokenizer_of(folder: Path, backend: Tokenizer) -> Path:
    """The manifest of such a target's tokenizer."""
    tokenizer = family("r1", backend)  # it asks by "<think>\n", as QwQ-32B does
    tokenizer.save_pretrained(folder / "tokenizer")
    write_manifest(folder / "tokenizer.json", folder / "tokenizer", "test", tokenizer_files(folder / "tokenizer"))
    return folder / "tokenizer.json"


def records(thoughtless: int) -> list[dict[str, Any]]:
    """20 answers, so many of them without the thought that the target begins with."""
    return [
        {"problem": f"what is {n}?", "qwq": f"So I need {n}." if n < thoughtless else f"<think>\n{n} it is\n</think>\n\n{n}."}
        for n in range(20)
    ]


def made(folder: Path, backend: Tokenizer, thoughtless: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packed rows' manifest."""
    folder.mkdir(exist_ok=True)
    raw = make_raw(folder, records(thoughtless), held_out=0.0)
    arguments = ["--raw", raw, "--tokenizer", tokenizer_of(folder, backend), "--shard", 0, "--num-shards", 1]
    monkeypatch.setattr(sys, "argv", ["data", "tokenize", *map(str, arguments), "--out", str(folder / "000.json")])
    verb.main()
    packing.make([folder / "000.json"], 64, "long", "truncate", folder / "packed/manifest.json")
    return folder / "packed/manifest.json"


@pytest.mark.parametrize(("thoughtless", "is_said"), [(3, True), (2, False)])
def test_it_is_said_of_more_than_a_tenth(
    tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: Any, thoughtless: int, is_said: bool
) -> None:
    packed = made(tmp_path, backend, thoughtless, monkeypatch)
    told = [capsys.readouterr().out]
    inspection.show(packed, 0)
    told.append(capsys.readouterr().out)
    stage = ["--recipe", "r.yaml", "--runtime", "t.yaml", "--target", "x", "--ranks", "1", "--data", str(packed)]
    plan.read_rows(plan.parser().parse_args(stage), [compose("train", ["run=demo", "recipe.data.sequence_length=64"]).recipe])
    told.append(capsys.readouterr().err)
    (row,) = tables.packed_table([read_json(packed)])
    told.append(row["warning"])
    found = [re.search(TOLD, text) for text in told]
    assert [match is not None for match in found] == [is_said] * 4, told
    assert {int(match[1]) for match in found if match} == ({thoughtless} if is_said else set())
