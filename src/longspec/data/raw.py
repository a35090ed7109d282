"""Read a source into validated records, held-out ones apart, and count every record: the `raw` verb."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.atomic_files import describe_files, write_manifest
from longspec.config.names import HUB_PREFIX
from longspec.data.align import pipeline
from longspec.data.hub import MANIFEST, read_fetched
from longspec.data.read import source_files, split_records
from longspec.data.read.source_files import ARCHIVE, Item
from longspec.data.read.split_records import UNANSWERED
from longspec.demo import puzzles, questions, stdlib

AFTER = ("shards", "regenerate")  # keys for later steps: `tokenize` and longspec.answers read them
# The settings each kind of source knows, with their defaults (None: must be given).
QUESTIONS: dict[str, Any] = {"records": None, "seed": 0, "min_characters": 0, "max_characters": 4000}
FILE: dict[str, Any] = {"held_out": 0.02, "held_out_by": "", "align": [], "max_rejected": 0.01, "max_line_mb": 32}
HUB: dict[str, Any] = {"revision": "main", **FILE}
# Keys that change no record that was read: a manifest has their defaults, so that no stage is trained anew for them.
READING = ("revision", "max_line_mb")
MADE: dict[str, dict[str, Any]] = {
    "stdlib": {"min_characters": 0, "as": "", "held_out": 0.06},
    "puzzles": {"records": None, "seed": 0, "held_out": 0.06},
    "questions": {**QUESTIONS, "held_out": 0.06, UNANSWERED: True},
}


def is_made(source: Any) -> bool:
    """Tell whether a source's records are made on this machine."""
    return isinstance(source, str) and source in MADE


def is_hub(source: Any) -> bool:
    """Tell whether a source is a name on the hub."""
    return isinstance(source, str) and source.startswith(HUB_PREFIX)


def complete(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with defaults filled in. Raises ValueError for one that this source does not know, or lacks.

    The plan checks by the schema of workflow.yaml what values each may have.
    """
    source = settings["source"]
    known = MADE[source] if is_made(source) else HUB if is_hub(source) else FILE
    given = {key: value for key, value in settings.items() if key not in ("source", *AFTER)}
    for key in given:
        if key not in known and key != UNANSWERED:
            raise ValueError(f"data.{name}.{key}: unknown for source {source}; known: {', '.join(known)}")
    whole: dict[str, Any] = {"source": source, **known, **given}
    for key, value in whole.items():
        if value is None:
            raise ValueError(f"data.{name}.{key}: must be given for source {source}")
    if is_hub(source) and str(source).endswith(ARCHIVE):
        raise ValueError(f"data.{name}.source: {source} is an archive, of which evaluation tasks read a `member`; give files")
    pipeline.parse(name, whole.get("align", []))
    return whole


def read(settings: dict[str, Any], files: list[Path]) -> Iterator[Item]:
    """Yield the items of the source, one for each record."""
    if settings["source"] == "stdlib":
        made: Any = stdlib.generate(settings["min_characters"], settings["as"] or None)
    elif settings["source"] == "puzzles":
        made = puzzles.generate(settings["records"], settings["seed"])
    elif settings["source"] == "questions":
        made = questions.generate(**{key: settings[key] for key in QUESTIONS})
    else:
        for path in files:
            yield from source_files.read(path, int(settings["max_line_mb"] * 1e6))
        return
    for number, (key, record) in enumerate(made, 1):
        yield Item(settings["source"], number, key.encode("utf-8", "surrogateescape"), record, jsonl.encode(record).encode())


def make(name: str, settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write the raw folder of a dataset, its manifest `out` last; return the manifest.

    Raises ValueError if the source cannot be read whole, if too many records are rejected, or if none is left to train on. In
    the last two cases the folder has no manifest, and its rejects can be looked at.
    """
    settings = complete(name, settings)
    source, origin = settings["source"], {}
    files: list[Path] = []
    if is_hub(source):
        files, hub = read_fetched(Path(MANIFEST.format(dataset=name)), f"data.{name}", source, settings["revision"])
        origin = {key: hub[key] for key in ("repository", "commit")}
    elif not is_made(source):
        files = source_files.files_of(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = split_records.sort(name, settings, read(settings, files), out)
    content = {
        "name": name,
        "settings": {key: HUB[key] if key in READING else value for key, value in settings.items()},
        "origin": origin,
        "inputs": describe_files(Path(), [str(path) for path in files]),
        "files": describe_files(out.parent, split_records.OUTPUTS),
        **done,
    }
    return write_manifest(out, out.parent, content)
