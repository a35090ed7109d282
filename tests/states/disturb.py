"""Builders of a shard disturbed at seeded random moments: `python -m tests.states.disturb --moments 200 --out RESULT.json`.

Each moment has a folder of its own. A builder is disturbed there, or files of one that has ended; then another builds on. It
is held against a shard that nobody disturbed:

* where the first builder did not end well there is no shard.json, and where files were changed afterwards, reading tells it
  or reads every row as it was written: the change is in a header;
* the second builder runs the target for those batches alone that hold a row which was not there: not written down, or not with
  the bytes of the undisturbed shard;
* in the end all files of the shard have these bytes.

Anything else ends this with an AssertionError. A builder is a fork of this process, in which the target is loaded.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import Qwen2Config

from longspec import lease
from longspec.atomic_files import write_json
from longspec.config import Build
from longspec.states.stored import build as building
from longspec.states.stored.chunk import Layout
from longspec.states.stored.manifest import SHARD, merge
from longspec.states.stored.reader import StoredRows
from longspec.states.stored.sample import sampled
from longspec.target import tokenizer
from tests.corpus import Corpus, sentences, write_raw
from tests.small_disk import fill, small_disk
from tests.states.conftest import SHAPE
from tests.states.stored import GLIDE_OFFLINE, Stored, save_target
from tests.train.test_held_out_estimate import make_packed

KINDS = ("SIGKILL", "cut", "flipped bit", "full disk", "file limit", "two builders")
ROWS_PER_FILE, MICRO_BATCH = 5, 2


@dataclass
class Bench:
    """The states, and how a shard of them looks that nobody disturbed."""

    stored: Stored
    files: dict[str, bytes]
    layouts: list[Layout]
    sample: set[int]  # rows that are computed once more, alone
    seconds: float  # of a builder that nobody disturbs

    @property
    def batches(self) -> list[list[int]]:
        rows = [row for layout in self.layouts for row in layout.rows]
        return [rows[start : start + MICRO_BATCH] for start in range(0, len(rows), MICRO_BATCH)]

    def there(self, folder: Path) -> set[int]:
        """Rows that are written down in a whole line, and whose bytes are those of the undisturbed shard."""
        found = set()
        for layout in self.layouts:
            names = [folder / f"{layout.name}{ending}" for ending in (".safetensors", ".part")]
            file = next((name for name in names if name.exists()), None)
            lines = Counter(line.strip(",") for line in self.files[f"{layout.name}.json"].decode().split("\n")[1:-2])
            written = "".join(
                path.read_text(errors="replace")
                for path in (folder / f"{layout.name}{ending}" for ending in (".json", ".jsonl"))
                if path.exists() and (path.suffix != ".json" or is_json(path))
            )
            content, whole = b"" if file is None else file.read_bytes(), self.files[f"{layout.name}.safetensors"]
            for line in set(written.replace(",\n", "\n").split("\n")[: None if written.endswith("}\n") else -1]) & lines.keys():
                row = json.loads(line)["row"]
                parts = [slice(layout.place(n, row), layout.place(n, row) + size) for n, size in enumerate(layout.sizes)]
                if all(content[part] == whole[part] for part in parts):
                    found.add(row)
        return found


def is_json(path: Path) -> bool:
    """Whether a file's bytes are the JSON of rows' lines."""
    try:
        return isinstance(json.loads(path.read_bytes()).get("rows"), list)
    except (ValueError, AttributeError):
        return False


def whole_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.startswith(("rows-", SHARD))}


def forked(work: Callable[[], int]) -> tuple[int, int]:
    """Start a child; its process id, and the end of a pipe that its number comes from when it ends well."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.write(write, str(work()).encode())
        os._exit(0)
    finally:
        os._exit(1)


def ended(child: int, pipe: int) -> int | None:
    """Wait for a child; its number, None when it did not end well."""
    with os.fdopen(pipe) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return int(text) if status == 0 else None


def builder(bench: Bench, folder: Path, limit: int | None = None) -> tuple[int, int]:
    """Start a builder in a folder; its number: how often the target ran. limit: bytes of a file that it may write."""

    def work() -> int:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        bench.stored.folder, bench.stored.batches = folder, 0
        bench.stored.build()
        return bench.stored.batches

    return forked(work)


def damage(draw: random.Random, folder: Path, kind: str) -> str:
    """Cut one file of a shard, or flip one of its bits; which."""
    path = draw.choice(
        [path for path in sorted(folder.iterdir()) if path.name.startswith(("rows-", SHARD)) and path.stat().st_size]
    )
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if kind == "cut":
        del content[at:]
    else:
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"{path.name} at byte {at}"


def disturb(bench: Bench, draw: random.Random, place: Path, kind: str) -> dict[str, object]:
    """One moment: what was done. `place` is the folder of the states."""
    folder, told = place / "0-of-1", {}
    if kind in ("full disk", "file limit"):
        room = draw.randrange(200, sum(map(len, bench.files.values())))
        if kind == "file limit":
            first = ended(*builder(bench, place, draw.randrange(200, max(map(len, bench.files.values())))))
        else:
            filler = fill(place)
            with filler.open("r+b") as file:
                file.truncate(filler.stat().st_size - room)
            # Room enough, it is told: the disk fills while it builds.
            with patch.object(building.shutil, "disk_usage", lambda _: argparse.Namespace(free=10**12)):
                first = ended(*builder(bench, place))
            filler.unlink()
        told |= {"bytes": room, "ended_well": first is not None}
    elif kind == "two builders":
        pair = [builder(bench, place)]
        time.sleep(draw.uniform(0, bench.seconds))
        pair.append(builder(bench, place))
        both = [ended(*each) for each in pair]
        assert None not in both or both.count(None) == 1, "one of them must have been let in"
        told |= {"ended_well": both.count(None) < 2}
    else:
        child, pipe = builder(bench, place)
        whole = kind != "SIGKILL" and draw.random() < 0.5  # damage of a shard that is done
        if not whole:
            time.sleep(draw.uniform(0, 1.1 * bench.seconds))
            os.kill(child, signal.SIGKILL)
        told |= {"ended_well": ended(child, pipe) is not None}
        if kind != "SIGKILL" and any(folder.glob("rows-*")):
            if whole:
                merge([folder / SHARD], place / "manifest.json")
            told |= {"file": damage(draw, folder, kind)}
            if whole:
                assert not is_read_wrongly(place / "manifest.json", bench.stored.folder / "0-of-1" / SHARD), told
    return told


def is_read_wrongly(damaged: Path, whole: Path) -> bool:
    """Whether rows come out of a damaged shard other than they were written, and nothing tells it."""
    expected = StoredRows(whole)
    rows = range(expected.declaration.num_rows)
    try:
        found = StoredRows(damaged).read(rows, pinned=False)
    except ValueError:
        return False
    return any(
        not torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8))
        for name, tensor in expected.read(rows, pinned=False).items()
    )


def moment(bench: Bench, draw: random.Random, place: Path, kind: str) -> dict[str, object]:
    """One disturbance and the builder after it; raises AssertionError where that did not go as it must."""
    folder = place / "0-of-1"
    told = {"kind": kind, **disturb(bench, draw, place, kind)}
    if not told["ended_well"] and "file" not in told:
        taken = (folder / SHARD).exists() and whole_files(folder) != bench.files
        assert not taken, f"{told}: a shard was taken for done"
    there = bench.there(folder) if folder.exists() else set()
    needed = [batch for batch in bench.batches if not there.issuperset(batch)]
    ran = ended(*builder(bench, place))
    assert ran is not None, f"{told}: it could not be built on"
    alone = sum(row in bench.sample for batch in needed for row in set(batch) - there)
    assert ran == len(needed) + alone, f"{told}: the target ran for {ran} batches, {len(needed)} + {alone} were needed"
    found = whole_files(folder)
    other = sorted(name for name in found.keys() | bench.files.keys() if found.get(name) != bench.files.get(name))
    assert not other, f"{told}: other bytes than undisturbed: {', '.join(other)}"
    return told | {"rows_there": len(there), "batches_again": ran}


def make_bench(folder: Path) -> Bench:
    """A tiny target, rows, and the shard of an undisturbed builder."""
    build = Build(vocabulary=275, hidden=32, layers=3, heads=4, intermediate=64)
    raw, manifest = write_raw(folder / "tiny", sentences(100)), folder / "model/tokenizer_manifest.json"
    tokenizer.make(build, [raw], manifest)
    data = make_packed(folder / "rows", Corpus(build, raw, manifest, raw, raw), "base", sentences(26), [])
    target = save_target(folder, Qwen2Config(vocab_size=275, initializer_range=0.3, **SHAPE))
    chosen = [*GLIDE_OFFLINE, f"runtime.micro_batch={MICRO_BATCH}"]
    stored = Stored(folder / "undisturbed", chosen, target, data)
    source = stored.source()
    job = stored.job(source)
    building.CHUNK_BYTES = ROWS_PER_FILE * job.declaration.row_bytes
    computation = stored.computation(job)  # forked with the target in it
    stored.computation = lambda _: computation  # type: ignore[method-assign]
    began = time.monotonic()
    stored.build()
    seconds = time.monotonic() - began
    writer = building.ShardWriter(stored.folder / "0-of-1", job.declaration, range(len(source)))
    layouts = [chunk.layout for chunk in writer.chunks]
    return Bench(stored, whole_files(stored.folder / "0-of-1"), layouts, sampled(range(len(source)), job.declaration), seconds)


@contextmanager
def place_of(kind: str) -> Iterator[Path | None]:
    """A folder for one moment, on a small disk of its own for a disk that is full; None where none may be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "full disk":
            with small_disk(Path(folder)) as disk:
                yield disk
        else:
            yield Path(folder)


def main() -> None:
    """Disturb, and write down what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lease.SETTLE = 0.02
    began, moments = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(Path(folder))
        for number in range(options.moments):
            kind = KINDS[number % len(KINDS)]
            with place_of(kind) as place:
                if place is None:
                    moments.append({"kind": kind, "skipped": "no file system may be mounted here"})
                    continue
                moments.append({"moment": number, **moment(bench, random.Random(f"{options.seed} {number}"), place, kind)})
            print(moments[-1], file=sys.stderr)
    by_kind = {kind: [each for each in moments if each["kind"] == kind] for kind in KINDS}
    counts = {
        kind: {
            "moments": len(each),
            "skipped": sum("skipped" in one for one in each),
            "first_builder_did_not_end_well": sum(not one.get("ended_well", True) for one in each),
        }
        for kind, each in by_kind.items()
    }
    told = {"rows": sum(layout.count for layout in bench.layouts), "rows_in_a_file": ROWS_PER_FILE, "batch": MICRO_BATCH}
    write_json(options.out, told | {"seconds": round(time.monotonic() - began, 1), "kinds": counts, "moments": moments})


if __name__ == "__main__":
    main()
