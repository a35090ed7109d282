"""Files of two runs that must be the same, bit for bit; of those that hold times as well, all else in them."""

import json
import re
from pathlib import Path
from typing import Any

from longspec.atomic_files import sha256_file, sha256_text

FOLDERS = ("data", "models", "results")
# Written for one process or one machine, or of the time that things took.
LEFT_OUT = re.compile(r"/checkpoints|/(\.lock|lease\.json|status\.json|report\.html|[^/]*\.tmp)$|/\.")
# manifest_sha256: of a checkpoint's manifest, which has times in it; its weights are in the draft. best: of chain lengths.
TIMES = re.compile(
    r"seconds|speed|per_second|_s$|time|memory|versions|commit|rss|draft_share|mfu|phases|manifest_sha256|^best$"
)


def without_times(content: Any) -> Any:
    """JSON without the entries whose names tell of a time, a speed or a machine."""
    if isinstance(content, dict):
        return {name: without_times(each) for name, each in content.items() if not TIMES.search(name)}
    return [without_times(each) for each in content] if isinstance(content, list) else content


def content_hash(path: Path) -> str:
    """The hash of a file that tells nothing of time, else of what it tells besides."""
    if path.parent.name == "evaluation" or path.name in ("metrics.jsonl", "report.json", "checkpoint.json", "provenance.json"):
        try:
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            return sha256_text(json.dumps([without_times(json.loads(line)) for line in lines]))
        except ValueError:  # it is damaged
            pass
    return sha256_file(path)


def kept_files(folder: Path) -> dict[str, str]:
    """The files of a finished run that must be the same in each, with their hashes."""
    found = [path for part in FOLDERS for path in (folder / part).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in sorted(found)}
    return {name: content_hash(path) for name, path in names.items() if not LEFT_OUT.search(name)}


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names of files that are missing, are too many, or are not the same."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
