"""Text to measure with: the demo's own datasets and a tokenizer of the demo's size, made once under .cache/benchmarks."""

from pathlib import Path
from typing import Any

from machine import WORK

from longspec.atomic_files import read_json
from longspec.config import Build
from longspec.data import raw
from longspec.target import tokenizer

DATASETS: dict[str, dict[str, Any]] = {
    "texts": {"source": "stdlib", "held_out": 0.0},
    "chats": {"source": "puzzles", "records": 2000, "seed": 0, "held_out": 0.0},
}


def raw_manifest(name: str) -> Path:
    """The raw manifest of a dataset."""
    path = WORK / "raw" / name / "manifest.json"
    if not path.is_file():
        raw.make(name, DATASETS[name], path)
    return path


def tokenizer_manifest() -> Path:
    """The manifest of a byte-level BPE of 4,096 entries."""
    path = WORK / "model/tokenizer_manifest.json"
    if not path.is_file() or not Path(read_json(path)["path"]).is_dir():
        build = Build(vocabulary=4096, hidden=32, layers=2, heads=4, intermediate=64, mixture=[], lr=1e-3)
        tokenizer.make(build, [raw_manifest(name) for name in DATASETS], path)
    return path
