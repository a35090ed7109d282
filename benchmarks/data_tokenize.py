"""Tokenizing, packing and writing against the tokenizer library alone: python benchmarks/data_tokenize.py

Both take the same text on the same cores, in turns, so that whatever else the machine does meets both. The library gets the
finished strings, in groups as large as the job's own: `fast` without character offsets, as running text is tokenized, `offsets`
with them, as conversations need them for their masks. The job does everything from the raw JSON Lines to packed rows on disk.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import corpora
import machine

from longspec import jsonl
from longspec.data import tokenize
from longspec.data.chat.encoding import Encoder, load_tokenizer
from longspec.data.pack import packing

ROUNDS = 5
BAR = 0.85
LENGTH = 1024


def seconds(work: Callable[[], Any]) -> dict[str, float]:
    """How long something takes, by the clock and in the time of all cores."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def groups_of(texts: list[str]) -> list[list[str]]:
    """The texts in groups of the job's size."""
    groups: list[list[str]] = [[]]
    size = 0
    for text in texts:
        groups[-1].append(text)
        size += len(text.encode())
        if size >= tokenize.GROUP_BYTES:
            groups.append([])
            size = 0
    return [group for group in groups if group]


def measure(name: str) -> dict[str, Any]:
    """All rounds of one dataset."""
    raw, manifest = corpora.raw_manifest(name), corpora.tokenizer_manifest()
    tokenizer, _ = load_tokenizer(manifest)
    encoder = Encoder(tokenizer)
    planned = [encoder.plan(record) for record in jsonl.read(raw.parent / "train.jsonl")]
    texts = [plan.text for plans in planned if isinstance(plans, list) for plan in plans]
    groups = groups_of(texts)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    out = machine.WORK / "tokenized" / name

    def job() -> None:
        tokenize.make(raw, manifest, 0, 1, out / "000.json")
        packing.make([out / "000.json"], LENGTH, "longcot", "split", out / "packed/manifest.json")

    ways: dict[str, Callable[[], Any]] = {
        "fast": lambda: [len(backend.encode_batch_fast(group)) for group in groups],
        "offsets": lambda: [len(backend.encode_batch(group)) for group in groups],
        "job": job,
    }
    rounds = []
    for number in range(ROUNDS + 1):
        done = {way: seconds(ways[way]) for way in ways}
        if number:  # the first one warms caches
            rounds.append(done)
            print(name, {way: round(each["wall"], 2) for way, each in done.items()}, flush=True)
    tokens = sum(len(encoding) for group in groups for encoding in backend.encode_batch_fast(group))
    shutil.rmtree(out)
    ratios = {
        f"{clock}_{way}": statistics.median(each[way][clock] / each["job"][clock] for each in rounds)
        for clock in ("wall", "cpu")
        for way in ("fast", "offsets")
    }
    return {
        "megabytes": sum(len(text.encode()) for text in texts) / 1e6,
        "tokens": tokens,
        "tokens_per_second": {way: tokens / statistics.median(each[way]["wall"] for each in rounds) for way in ways},
        "ratios": ratios,
        "rounds": rounds,
    }


def main() -> None:
    """Measure both kinds of records; of texts the bar is the library without offsets, of chats with them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    numbers: dict[str, Any] = {"machine": machine.describe(("tokenizers", "transformers", "pyarrow", "numpy")), "bar": BAR}
    numbers |= {name: measure(name) for name in corpora.DATASETS}
    reached = {"texts": numbers["texts"]["ratios"]["wall_fast"], "chats": numbers["chats"]["ratios"]["wall_offsets"]}
    numbers |= {"reached": reached, "holds": all(ratio >= BAR for ratio in reached.values())}
    print({name: round(ratio, 3) for name, ratio in reached.items()}, "of the library's throughput; bar", BAR)
    machine.write("data_tokenize", numbers)


if __name__ == "__main__":
    main()
