"""The published run from its first download to its page: tiny files in the published formats stand in place of every download,
and a tiny Qwen2 in that of the target. Every job is run; SMALL alone is changed: batches, lengths, contexts, numbers of files.
"""

import io
import json
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from longspec import jsonl
from longspec.config import yaml_files
from longspec.data import presets
from longspec.data.hub.names import parse
from tests.corpus import Corpus
from tests.data.hub_standin import Hub, running
from tests.workflow.planning import Workflow, copy_to
from tests.workflow.running import build

pytestmark = [pytest.mark.slow, pytest.mark.long]
CALL = ("final_draft", "--config", "runs=[published]")
P = "results/published/sinkpi-slicing"
SMALL_STAGE = "recipe:\n  data: {sequence_length: 64}\n  global_batch: 32\n"
SMALL_RUN = [
    (r"prompts: 30", "prompts: 2"),
    (r"new_tokens: \d+", "new_tokens: 8"),
    (r"context: \[\d+, \d+\]", "context: [8, 40]"),
    (r"\{preset: (gov-report|qmsum|multi-news|lcc|repobench-p)\}", r"{preset: \1, new_tokens: 8}"),
]
RECORDS = 250  # of a dataset; one in fifty is held out
WORDS = ["the", "red", "fox", "meets", "lazy", "dog", "green", "bird", "old", "cat"]
MATHS = {"problem": "How many are two and three?", "solution": "Five.", "answer": "5"}
LONGBENCH = {"context": "the red fox meets the dog. " * 20, "input": "Who?", "answers": ["The dog"], "_id": "0"}


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=14)) + "."


def long_document(draw: random.Random, number: int) -> dict[str, Any]:
    """Of each kind that the published file of long data has."""
    talk = [{"role": "user", "content": text(draw)}, {"role": "assistant", "content": text(draw)}]
    return [
        {"source": "code", "text": text(draw)},
        {"source": "book", "text": text(draw)},
        {"source": "arxiv", "article": text(draw), "abstract": text(draw)},
        {"source": "tulu-v2", "conversation": talk},
    ][number % 4]


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(records: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), written)
    return written.getvalue()


def archive(names: list[str]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            packed.writestr(f"data/{name}.jsonl", lines([LONGBENCH] * 3))
    return written.getvalue()


def downloads() -> dict[str, dict[str, bytes]]:
    """By the preset of training data or of prompts, the files of its repository."""
    draw = random.Random(0)
    part = "00000-of-00001.parquet"
    return {
        "slimpajama-6b": {f"data/train-{part}": table([{"text": text(draw), "meta": {"set": "C4"}} for _ in range(RECORDS)])},
        "longspec-long": {"long_data.jsonl": lines([long_document(draw, number) for number in range(RECORDS)])},
        "qwq-longcot-130k": {f"data/train-{part}": table([{"problem": text(draw), "qwq": text(draw)} for _ in range(RECORDS)])},
        "gsm8k": {f"main/test-{part}": table([{"question": "How many?", "answer": "5"}] * 3)},
        "math": {"test.jsonl": lines([MATHS] * 3)},
        "aime-2024": {f"data/train-{part}": table([MATHS] * 3)},
        "lcc": {"data.zip": archive(["gov_report", "qmsum", "multi_news", "lcc", "repobench-p"])},
    }


def target_files(folder: Path, corpus: Corpus) -> dict[str, bytes]:
    """The files of a tiny Qwen2 as a model's repository has them."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=275, num_key_value_heads=2, max_position_embeddings=1024, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for path in (corpus.tokenizer.parent / "tokenizer").iterdir():
        shutil.copy(path, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Every repository that the run names, at the commit that it names."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with running() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.address)
        for name, files in downloads().items():
            kind = presets.DATA if name in presets.DATA.read() else presets.TASK
            asked = presets.expand(name, {"preset": name}, kind)
            commit = started.add(parse(asked["source"]).repository, files)
            started.repositories[parse(asked["source"]).repository].refs[asked["revision"]] = commit
        started.add("Qwen/QwQ-32B-Preview", target_files(tmp_path / "target", corpus))
        yield started


@pytest.fixture
def workflow(tmp_path: Path, root: Path) -> Workflow:
    """The workflow with small numbers."""
    (tmp_path / "copy").mkdir()
    copy = copy_to(tmp_path / "copy", root)
    for pattern, new in SMALL_RUN:
        copy.edit("config/run/published.yaml", pattern, new)
    copy.edit("config/workflow.yaml", r"\{preset: (slimpajama-6b|longspec-long|qwq-longcot-130k)\}", r"{preset: \1, shards: 2}")
    for stage in ("base", "long", "longcot"):
        copy.edit(f"config/run/published.yaml:{stage}", r"\Z", SMALL_STAGE)
    return copy


def test_the_published_run_is_planned_and_goes_to_its_end(workflow: Workflow, hub: Hub) -> None:
    planned = workflow.output("-n", *CALL)
    assert "fetch_prompts               4" in planned
    assert not (workflow.folder / "data").exists()
    build(workflow, *CALL)
    folder = workflow.folder / P
    recipes = [yaml_files.read(folder / stage / "recipe.yaml") for stage in ("base", "long", "longcot")]
    assert [recipe["draft"]["loss"] for recipe in recipes] == ["hard"] * 3
    assert [recipe["optimizer"]["lr"] for recipe in recipes] == [5e-4, 5e-6, 5e-6]
    tasks = yaml_files.read(workflow.folder / "config/run/published.yaml")["evaluation"]["tasks"]
    for drafter in ("untrained", "lookup", "base", "long", "longcot"):
        measured = list(jsonl.read(folder / f"evaluation/{drafter}.jsonl"))
        assert {line["task"] for line in measured} == set(tasks)
        assert sum(line["mismatches"] - line["near_ties"] for line in measured) == 0
    for name in ("longcot/draft", "final_draft"):
        assert {"model.safetensors", "tokenizer.json", "training_config.yaml"} < {
            path.name for path in (folder / name).iterdir()
        }
    assert json.loads((folder / "final_draft/provenance.json").read_text())["order"] == ["base", "long", "longcot"]
    assert (workflow.folder / "results/published/report.html").is_file()
    assert "Nothing to be done" in build(workflow, *CALL)
