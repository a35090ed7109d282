"""Evaluations and answers of a target that is split over ranks, started by the workflow itself, tell what one rank's tell."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from longspec import jsonl
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
P = "results/tiny/sinkpi-slicing"
GOALS = [f"{P}/evaluation/untrained.jsonl", f"{P}/evaluation/lookup.jsonl"]
TOLD_BY_ONE = ("seconds", "sample")  # fields that no two evaluations have in common


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


def measured(path: Path) -> list[dict[str, Any]]:
    """What an evaluation tells, but for times."""
    return [{name: told for name, told in line.items() if not name.startswith(TOLD_BY_ONE)} for line in jsonl.read(path)]


def answered(folder: Path) -> dict[str, Any]:
    """By record the answers, in whichever order they were made."""
    (journal,) = folder.glob("data/answers/tiny/asked/*/0-of-1/journal.jsonl")
    return {json.dumps(line["record"]): line for line in list(jsonl.read(journal))[1:]}


def made(workflow: Workflow, *options: str) -> tuple[list[list[dict[str, Any]]], dict[str, Any], str]:
    """The lines of each evaluation, the answers, and what Snakemake printed."""
    command = [sys.executable, "-m", "snakemake", "--printshellcmds", *GOALS, "--cores", "2", *options]
    environment = os.environ | {"PYTHONPATH": str(workflow.folder / "src")}
    done = subprocess.run(command, cwd=workflow.folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return [measured(workflow.folder / goal) for goal in GOALS], answered(workflow.folder), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long  # tests/answers and tests/measure have each job on two ranks; test_sbatch.py has the workflow ask for them
def test_two_ranks_of_the_workflows_jobs_tell_what_one_tells(workflow: Workflow) -> None:
    pytest.importorskip("accelerate")
    lines, answers, text = made(workflow)
    assert "launch --plain --ranks 1 " in text
    assert any(line["accepted"] and max(line["accepted"]) > 0 for line in lines[1]), "something was accepted"
    assert answers
    for made_by_one in ("data/answers", f"{P}/evaluation"):
        shutil.rmtree(workflow.folder / made_by_one)
    split = ["--set-resources", "evaluate:ranks=2", "answer:ranks=2"]
    assert made(workflow, *split)[:2] == (lines, answers)
    logs = [workflow.folder / f"logs/evaluate/tiny/sinkpi-slicing/{name}.log" for name in ("untrained", "lookup")]
    logs += workflow.folder.glob("logs/answer/tiny/asked/*/0-of-1.log")
    for log in logs:
        assert "--nproc-per-node=2" in log.read_text()
    assert len(logs) == 3
    assert "Nothing to be done" in workflow.output(*GOALS, "--cores", "2"), "how many ranks there were measures nothing anew"


def test_ranks_that_cannot_share_the_heads_die_before_anything_runs(workflow: Workflow) -> None:
    done = workflow.call("-n", *GOALS, "--set-resources", "evaluate:ranks=3")
    assert done.returncode == 1
    told = " ".join((done.stdout + done.stderr).split())
    assert (
        "set-resources: evaluate: ranks: 3: run 'tiny': evaluate: ranks share its num_key_value_heads: 4, none of which" in told
    )
    assert "Traceback" not in told


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
    with (tmp_path / "target/model.safetensors").open("r+b") as weights:
        weights.truncate(10**9)
    jobs = asked_of_slurm(workflow)
    assert {(job["gres"], job["ranks"]) for job in jobs.values()} == {("gpu:1", "1")}
    with (tmp_path / "target/model.safetensors").open("r+b") as weights:
        weights.truncate(10**12)
    told = workflow.call("-n", "final_draft", "--profile", "slurm")
    assert told.returncode == 1
    refused = (
        r"(run 'tiny': evaluate|answers by tiny to asked): needs [12]0\d\d\.\d GB on each of 1, .* on each of 4 GPUs, by an"
    )
    assert re.search(refused, " ".join((told.stdout + told.stderr).split()))
