"""A tiny corpus of text, and what is made of it before training."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.atomic_files import describe_files, write_json
from longspec.config import Build

LENGTH = 48
NAMES = ("train.jsonl", "held_out.jsonl", "rejects.jsonl")


@dataclass(frozen=True)
class Corpus:
    """The manifests of every step before training."""

    build: Build
    raw: Path
    tokenizer: Path
    packed: Path
    answers: Path  # rows of which only answers are labels


def write_raw(folder: Path, train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]] = ()) -> Path:
    """A raw folder of these records; returns its manifest."""
    for name, records in zip(NAMES, (train, held_out, ()), strict=True):
        jsonl.write(folder / name, records)
    manifest = folder / "manifest.json"
    counts = {"read": len(train) + len(held_out), "train": len(train), "held_out": len(held_out), "rejected": 0, "filtered": 0}
    files = describe_files(folder, list(NAMES))
    write_json(manifest, {"name": folder.name, "settings": {}, "files": files, "records": counts})
    return manifest


def sentences(count: int) -> list[dict[str, object]]:
    """Documents of 1 to 6 sentences over few words: predictable from the word before, not from frequencies."""
    draw = random.Random(0)
    things = ["red fox", "lazy dog", "green bird", "old cat"]
    lines = [f"the {thing} meets the {other}. " for thing, other in zip(things, things[1:] + things[:1], strict=True)]
    return [{"text": "".join(draw.choices(lines, k=draw.randint(1, 6)))} for _ in range(count)]


def questions(count: int) -> list[dict[str, object]]:
    """Problems whose answers differ in length up to tenfold."""
    draw = random.Random(1)
    return [{"problem": "count the fox", "qwq": "the fox meets the cat. " * draw.choice([1, 1, 2, 10])} for _ in range(count)]
