"""Token ids and answer masks, verified by decoding."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longspec.data import raw, tokenize
from longspec.data.chat.chat_template import CHATML
from longspec.data.chat.encoding import Encoder
from longspec.data.layout_tally import unlike_served_warning
from longspec.data.pack import packing
from longspec.draft_vocabulary import tokenizer_files
from longspec.target import fetch
from tests.data.families import byte_level, family
from tests.refusals import refused


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x  # größer, 数, 🙂\n\n", "a <|im_end|> b <|im_start|>assistant <|endoftext|>"]
)
def test_text_is_whole_and_ends_with_eos(tokenizer: Any, text: str) -> None:
    """Names of special tokens in it stay text."""
    [made] = Encoder(tokenizer).documents({"text": text})
    ids = made.ids
    assert (ids.dtype, made.answer_mask.dtype) == (np.int32, np.uint8)
    assert made.answer_mask.all()
    assert ids[-1] == tokenizer.eos_token_id
    assert not set(ids[:-1].tolist()) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == text


def make_raw(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = folder / "raw" / "manifest.json"
    raw.make("d", {"source": str(source), "held_out": 0.0, **settings}, out)
    return out


@pytest.mark.parametrize("num_shards", [3, 25])
def test_shards_hold_every_record_once(tmp_path: Path, tokenizer_manifest: Path, tokenizer: Any, num_shards: int) -> None:
    """Wherever the borders fall, and with more shards than records, of which some are then empty."""
    records: list[dict[str, Any]] = [{"text": f"document {n} größer " * (n + 1)} for n in range(11)]
    source = make_raw(tmp_path, records)
    train = (source.parent / "train.jsonl").read_bytes()
    found: list[dict[str, Any]] = []
    paths = [tmp_path / f"{shard:03}.json" for shard in range(num_shards)]
    for shard, path in enumerate(paths):
        manifest = tokenize.make(source, tokenizer_manifest, shard, num_shards, path)
        table = pa.ipc.open_file(str(path.with_suffix(".arrow"))).read_all().to_pydict()
        assert manifest["tokens"] == sum(map(len, table["input_ids"]))
        assert manifest["documents"] == len(table["record"])
        for place, ids in zip(table["record"], table["input_ids"], strict=True):
            record = json.loads(train[place:].split(b"\n")[0])
            assert tokenizer.decode(ids[:-1]) == record["text"]
            found.append(record)
    assert found == records
    packed = packing.make(paths, 64, "base", "split", tmp_path / "packed" / "manifest.json")
    assert packed["documents"] == 11


def refusing(tokenizer: Any, folder: Path) -> Path:
    """The same tokenizer with a template that knows no system role."""
    tokenizer = copy.deepcopy(tokenizer)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + CHATML
    tokenizer.save_pretrained(folder / "refusing")
    fetch.write_manifest(folder / "refusing.json", folder / "refusing", "test", tokenizer_files(folder / "refusing"))
    return folder / "refusing.json"


def chats(count: int, with_system: set[int]) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    system = [{"role": "system", "content": "s"}]
    return [{"messages": system * (n in with_system) + turns} for n in range(count)]


def test_what_a_template_refuses_is_counted_over_all_shards(tmp_path: Path, tokenizer: Any) -> None:
    """One refused record is more than a hundredth of its small shard, two are no more than one of all, three are too many."""
    refused_by, tokens = refusing(tokenizer, tmp_path), [tmp_path / f"{shard:03}.json" for shard in range(20)]
    for with_system in ([7, 90, 150], [7, 150]):
        source = make_raw(tmp_path, chats(200, set(with_system)))
        made = [tokenize.make(source, refused_by, n, 20, path) for n, path in enumerate(tokens)]
        lines = (source.parent / "train.jsonl").read_bytes().splitlines(keepends=True)
        reasons = [manifest["skipped"]["reasons"] for manifest in made if manifest["skipped"]["count"]]
        assert reasons == [
            {"the chat template refuses it: no system role": {"count": 1, "first": len(b"".join(lines[:number]))}}
            for number in with_system
        ]
        if len(with_system) == 3:
            with refused(f"{tmp_path}: 3 of 200 records", "0.01", "max_rejected"):
                packing.make(tokens, 64, "long", "split", tmp_path / "packed" / "manifest.json")
    packed = packing.make(tokens, 64, "long", "split", tmp_path / "packed" / "manifest.json")
    assert (packed["documents"], packed["skipped"], packed["raw_records"]["train"]) == (198, 2, 200)


@pytest.mark.parametrize(("thoughtless", "is_said"), [(3, True), (2, False)])
def test_more_than_a_tenth_laid_out_unlike_what_is_served_is_said(tmp_path: Path, thoughtless: int, is_said: bool) -> None:
    """20 answers, so many of them without the thought that the target begins with."""
    family("r1", byte_level()).save_pretrained(tmp_path / "tokenizer")  # it asks by "<think>\n", as QwQ-32B does
    fetch.write_manifest(tmp_path / "r1.json", tmp_path / "tokenizer", "test", tokenizer_files(tmp_path / "tokenizer"))
    thoughts = [f"So I need {n}." if n < thoughtless else f"<think>\n{n} it is\n</think>\n\n{n}." for n in range(20)]
    raw_manifest = make_raw(tmp_path, [{"problem": "what is it?", "qwq": thought} for thought in thoughts])
    tokens = tokenize.make(raw_manifest, tmp_path / "r1.json", 0, 1, tmp_path / "000.json")
    packed = packing.make([tmp_path / "000.json"], 64, "long", "truncate", tmp_path / "packed/manifest.json")
    for manifest in (tokens, packed):
        assert unlike_served_warning(manifest).startswith("d: 3 of 20 documents are laid out otherwise") == is_said
