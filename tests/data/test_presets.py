"""The published datasets by name: what a preset gives, and what wins over it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspec import jsonl
from longspec.config import yaml_files
from longspec.data import presets, raw
from longspec.data.hub import choose, parse
from longspec.data.read.records import Chat, Text, to_messages_or_text

TALK = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
SHARED = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
# What each published file holds: its path in the repository, some of its records, and what becomes of them.
PUBLISHED: dict[str, tuple[str, list[dict[str, Any]], list[Text | Chat]]] = {
    "slimpajama-6b": (
        "data/train-00000-of-00001-ab1c90739ebc1d84.parquet",
        [{"text": "t", "meta": {"redpajama_set_name": "RedPajamaC4"}, "__index_level_0__": 1}],
        [Text("t")],
    ),
    "longspec-long": (
        "long_data.jsonl",
        [{"source": "book", "text": "t"}, {"source": "tulu-v2", "conversation": TALK}],
        [Text("t"), Chat(TALK)],
    ),
    "qwq-longcot-130k": (
        "data/train-00000-of-00001.parquet",
        [{"problem": "u", "qwq": "a", "source": "amphora/verfiable-25K", "split": "train", "__index_level_0__": 1}],
        [Chat(TALK)],
    ),
    "sharegpt": (
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        [
            {"id": "x_0", "conversations": SHARED},
            {"id": "x_1", "conversations": []},
            {"id": "x_2", "conversations": SHARED[1:] + SHARED},
        ],
        [Chat(TALK), Chat(TALK)],
    ),
    "ultrachat": (
        "data/train_sft-00000-of-00001-a3ecf92756993583.parquet",
        [{"prompt": "u", "prompt_id": "0", "messages": TALK}],
        [Chat(TALK)],
    ),
}

FROM_HERE = {"smollm2-questions", "smollm2-long", "gsm8k-train"}  # made here, or of a file that the user places


def encoded(path: str, records: list[dict[str, Any]], folder: Path) -> bytes:
    """The records in the kind of file that a path names."""
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), folder / "table.parquet")
        return (folder / "table.parquet").read_bytes()
    if path.endswith(".jsonl"):
        return "".join(json.dumps(record) + "\n" for record in records).encode()
    return json.dumps(records, indent=2).encode()


def test_gsm8ks_training_questions_are_read_without_their_answers(tmp_path: Path) -> None:
    short, long = "How many are 2 and 3?", "How many are " + "1 and " * 40 + "1?"
    source, out = tmp_path / "in.jsonl", tmp_path / "raw/manifest.json"
    source.write_text("".join(json.dumps({"question": text, "answer": "5 #### 5"}) + "\n" for text in (short, long)))
    settings = presets.expand("d", {"preset": "gsm8k-train", "source": str(source), "held_out": 0.0})
    manifest = raw.make(
        "d", {key: value for key, value in settings.items() if key not in raw.AFTER} | {"unanswered": True}, out
    )
    assert (manifest["records"]["train"], manifest["records"]["filtered"]) == (1, 1)
    assert list(jsonl.read(out.parent / "train.jsonl")) == [{"problem": short}]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_presets_records_become_documents(tmp_path: Path, preset: str) -> None:
    """Of a file that its source names, on this machine."""
    path, records, documents = PUBLISHED[preset]
    whole = presets.expand("d", {"preset": preset, "held_out": 0})
    assert choose(parse(whole["source"]), [path, "README.md", "other/train.jsonl"], "") == [path]
    file, out = tmp_path / Path(path).name, tmp_path / "raw/manifest.json"
    file.write_bytes(encoded(path, records, tmp_path))
    made = raw.make("d", presets.expand("d", {"preset": preset, "held_out": 0, "source": str(file)}), out)
    assert made["records"]["rejected"] == 0
    assert [to_messages_or_text(record) for record in jsonl.read(out.parent / "train.jsonl")] == documents


def test_every_published_set_has_a_preset_over_which_wins_what_is_given() -> None:
    assert yaml_files.read(presets.FILES[presets.DATA]).keys() == PUBLISHED.keys() | FROM_HERE
    plain = presets.expand("d", {"preset": "sharegpt"})
    assert presets.expand("d", {"preset": "sharegpt", "shards": 3, "revision": "v2"}) == plain | {"shards": 3, "revision": "v2"}
    local = presets.expand("d", {"preset": "sharegpt", "source": "inputs/sharegpt.json"})
    assert local == {key: value for key, value in plain.items() if key != "revision"} | {"source": "inputs/sharegpt.json"}
    raw.complete("d", local)
    assert presets.expand("d", {"source": "x.jsonl", "shards": 1}) == {"source": "x.jsonl", "shards": 1}
