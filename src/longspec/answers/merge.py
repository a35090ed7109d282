"""The answers of all shards as a folder like that of raw records; `tokenize` and evaluations read it instead.

train.jsonl, held_out.jsonl    {"messages": [...], "line": of the raw file}, the answers' tokens where they are known, tools and
                               template arguments too; in the raw order
manifest.json                  written last: the counts of all shards added up
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.answers.conversation import ENDS, FAILED, FILES, TAKEN, hashes_of
from longspec.answers.settings import HASHES, JOURNAL, SERVED
from longspec.atomic_files import checked_manifest, describe_files, read_json, remove_strays, write_json
from longspec.data.layout_tally import CUT_BY_LIMIT, answer_reasons
from longspec.data.read.records import ANSWER_IDS, BESIDE

Place = tuple[int, Path, int]  # a record's line in the raw file, the journal with its answers, the byte where its line begins


def _places(journals: list[Path]) -> dict[str, list[Place]]:
    """Return where the answers of each file's records stand, in the raw order. No texts are held in memory."""
    found: dict[str, list[Place]] = {name: [] for name in FILES}
    for path in journals:
        with path.open("rb") as handle:
            place = len(handle.readline())
            for text in handle:
                line = json.loads(text)
                if line["end"] in TAKEN:
                    name, number = line["record"]
                    found[name].append((number, path, place))
                place += len(text)
    return {name: sorted(places) for name, places in found.items()}


def _records(places: list[Place]) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        handles = {path: stack.enter_context(path.open("rb")) for path in {path for _, path, _ in places}}
        for number, path, place in places:
            handles[path].seek(place)
            line = json.loads(handles[path].readline())
            yield {name: line[name] for name in ("messages", ANSWER_IDS, *BESIDE) if name in line} | {"line": number}


def _checked(shards: list[Path], raw: Path) -> list[dict[str, Any]]:
    """Return the shards' manifests. Raises ValueError unless they are all shards of these records, made alike, and whole."""
    manifests = [checked_manifest(path) for path in shards]
    # An older longspec's shards hold hashes of manifests' texts. Where a newer shard has both hashes, the files' are compared.
    # The returned manifests keep the old hashes: a merged manifest with other bytes would train finished stages again.
    newer = {(key, text): files for each in manifests for key, (text, files) in each.get(HASHES, {}).items()}
    alike = [each | {key: newer.get((key, each[key]), each[key]) for key in ("target", "tokenizer")} for each in manifests]
    wanted = alike[0] | {"raw": hashes_of(read_json(raw))}
    for path, manifest in zip(shards, alike, strict=True):
        for key in ("dataset", "settings", "raw", "target", "tokenizer", "num_shards", SERVED):
            if manifest.get(key) != wanted.get(key):
                told = f"is {manifest.get(key)}, that of {shards[0]} {wanted.get(key)}"
                fix = "remove the folder of the one that is not of today's settings and server, then answer the shard again"
                raise ValueError(f"{path}: {key}: {told}; {fix}")
    if sorted(manifest["shard"] for manifest in manifests) != list(range(wanted["num_shards"])):
        raise ValueError(f"{shards[0]}: is one of {wanted['num_shards']} shards; give each of them once")
    return manifests


def _added(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    ends = {end: sum(manifest["ends"][end] for manifest in manifests) for end in ENDS}
    reasons = {end: sum((Counter(manifest["reasons"][end]) for manifest in manifests), Counter[str]()) for end in ENDS}
    sums = {key: sum(manifest[key] for manifest in manifests) for key in ("records", "answers", "tokens")}
    return sums | {"ends": ends, "reasons": {end: dict(found) for end, found in reasons.items() if found}}


def merge(shards: list[Path], raw: Path, out: Path) -> dict[str, Any]:
    """Write the folder of `out`; return its manifest. Raises ValueError as _checked does, and if no record is to train on."""
    manifests = _checked(shards, raw)
    of_raw, counts = read_json(raw), _added(manifests)
    places = _places([path.parent / JOURNAL for path in shards])
    if not places["train"]:
        key, reasons = f"data.{of_raw['name']}.regenerate", answer_reasons(counts)
        less = f"raise {key}.new_tokens, or set {key}.cut: keep" if CUT_BY_LIMIT in reasons else f"remove {key}"
        raise ValueError(f"{raw}: no record for training has an answer: {reasons}; {less}")
    out.unlink(missing_ok=True)  # an old manifest must not stand beside new records
    remove_strays(*(out.parent / f"{name}.jsonl" for name in FILES))
    written = {name: jsonl.write(out.parent / f"{name}.jsonl", _records(places[name])) for name in FILES}
    assert sum(written.values()) == counts["records"] - sum(counts["ends"][end] for end in set(ENDS) - set(TAKEN))
    manifest = {
        "name": of_raw["name"],
        "settings": of_raw["settings"],
        "records": of_raw["records"] | written,
        "answers": counts,
        "answered_by": {key: manifests[0][key] for key in ("settings", "target", "tokenizer", "raw")},
        "raw_manifest": str(raw),
        "files": describe_files(out.parent, [f"{name}.jsonl" for name in FILES]),
    }
    write_json(out, manifest)
    return manifest


def counts_line(counts: dict[str, Any]) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in counts["ends"].items() if count or end == FAILED)
    made = f"{counts['records']} records: {ends}; {counts['answers']} answers of {counts['tokens']} tokens"
    return "; ".join(filter(None, [made, answer_reasons(counts)]))
