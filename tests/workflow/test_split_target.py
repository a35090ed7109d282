"""A target that is split over ranks: what its jobs ask a cluster for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.corpus import Corpus
from tests.workflow.planning import Workflow, copy_to

MODEL = "# @package recipe.model\nfamily: qwen2\nname: tiny\nsource: {folder}\n"
RUN = """\
target: tiny
stages: [base]
recipe: {data: {name: asked, sequence_length: 64}}
evaluation:
  prompts: 3
  repeats: 1
  temperatures: [0, 0.8]
  shapes: [[2, 3]]
  tasks:
    asked: {data: asked, context: [8, 400], new_tokens: 48, whole_questions: true}
"""
ASKED = (
    "  asked: {source: puzzles, records: 200, seed: 0, shards: 1,"
    " regenerate: {new_tokens: 4, cut: keep, precision: fp32, batch: 64}}\n"
)


def make_target(folder: Path, corpus: Corpus, **other: Any) -> None:
    """A tiny Qwen2 with its tokenizer, as a user has it in a folder. other: settings of its config.json."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "vocab_size": 275, "max_position_embeddings": 512, "initializer_range": 0.3}
    config = Qwen2Config(**shape | other)
    Qwen2ForCausalLM(config).to(config.dtype).save_pretrained(folder)
    for path in (corpus.tokenizer.parent / "tokenizer").iterdir():
        shutil.copy(path, folder)


@pytest.fixture
def workflow(tmp_path: Path, root: Path, corpus: Corpus) -> Workflow:
    """A copy with a run for such a target, and a dataset that it is to answer."""
    (tmp_path / "copy").mkdir()
    copy = copy_to(tmp_path / "copy", root)
    make_target(tmp_path / "target", corpus)
    (copy.folder / "config/model/tiny.yaml").write_text(MODEL.format(folder=tmp_path / "target"))
    (copy.folder / "config/run/tiny.yaml").write_text(RUN)
    copy.edit("config/workflow.yaml", r"^data:\n", f"data:\n{ASKED}")
    copy.edit("config/workflow.yaml", r"^runs: \[.*?\]", "runs: [tiny]")
    return copy


def asked_of_slurm(workflow: Workflow) -> dict[str, dict[str, str]]:
    """The resources of each job that decodes, by its first output, as a cluster is asked for them."""
    found = {}
    for path, job in workflow.plan("--profile", "slurm").items():
        if job["rule"] in ("evaluate", "answer"):
            found[path] = dict(part.split("=", 1) for part in job["resources"].split(", ")) | {"command": job["command"]}
    return found


def test_a_large_targets_jobs_ask_for_as_many_gpus_as_hold_it(workflow: Workflow, tmp_path: Path) -> None:
    """Its file of weights has their size, and nothing in it. It is to answer in float32, twice the size of its bfloat16."""
    file = tmp_path / "target/config.json"
    config = json.loads(file.read_text())
    sizes = {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 64}
    file.write_text(json.dumps(config | sizes | {"dtype": "bfloat16"}))
    with (tmp_path / "target/model.safetensors").open("r+b") as weights:
        weights.truncate(130 * 10**9)
    jobs = asked_of_slurm(workflow)
    for path, job in jobs.items():
        ranks = "2" if "/evaluation/" in path else "4"
        assert (job["gres"], job["ranks"]) == (f"gpu:{ranks}", ranks)
        assert f"launch --plain --ranks {ranks} --cpus 8 -- longspec." in job["command"]
    assert len(jobs) == 4
