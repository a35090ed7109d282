"""From the hub and from files to records, by Snakemake itself; and by a login node's installation, `pip install -e .`."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json
from tests.data.hub_standin import Hub
from tests.workflow.planning import Workflow

pytestmark = pytest.mark.slow
HUB, RAW = "data/hub/puzzles/manifest.json", "data/raw/puzzles/manifest.json"
PACKED = "data/packed/demo/puzzles-longcot-2048-split/manifest.json"
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(60)]


def lines(records: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def records(workflow: Workflow) -> list[dict[str, str]]:
    folder = (workflow.folder / RAW).parent
    return [record for part in ("train", "held_out") for record in jsonl.read(folder / f"{part}.jsonl")]


def test_a_dataset_of_the_hub_is_fetched_pinned_and_read(workflow: Workflow, hub: Hub) -> None:
    source = "{source: 'hf:o/gsm8k/main/train-*.jsonl', align: [{rename: {question: problem, answer: qwq}}], shards: 2}"
    workflow.edit("config/workflow.yaml", "puzzles: .*", f"puzzles: {source}")
    first = hub.add("o/gsm8k", {"main/train-0.jsonl": lines(QUESTIONS), "main/test.jsonl": b"{}"})
    workflow.output(RAW, "--cores=1")
    assert json.loads((workflow.folder / HUB).read_text())["commit"] == first
    assert sorted(record["problem"] for record in records(workflow)) == sorted(q["question"] for q in QUESTIONS)
    assert {tuple(record) for record in records(workflow)} == {("problem", "qwq")}

    second = hub.commit("o/gsm8k", {"main/train-0.jsonl": lines(QUESTIONS[:20])})
    assert "Nothing to be done" in workflow.output(RAW, "--cores=1")
    done = workflow.call(RAW, "--cores=1", "--forcerun", "fetch_data")
    assert done.returncode == 1
    assert f"set `revision: {first}` to stay, or `revision: {second}` to accept" in done.stdout + done.stderr
    assert json.loads((workflow.folder / HUB).read_text())["commit"] == first, "a failed fetch keeps the manifest"
    workflow.edit("config/workflow.yaml", r"train-\*\.jsonl',", f"train-*.jsonl', revision: {second},")
    workflow.output(RAW, "--cores=1")
    assert len(records(workflow)) == 20


def test_a_job_that_fails_of_its_rejects_leaves_them_to_be_read(workflow: Workflow) -> None:
    workflow.edit("config/workflow.yaml", "puzzles: .*", "puzzles: {source: in.jsonl, shards: 2}")
    (workflow.folder / "in.jsonl").write_bytes(lines(QUESTIONS))
    done = workflow.call(RAW, "--cores=1", shown=False)
    assert done.returncode == 1
    told = (done.stdout + done.stderr).splitlines()
    assert not any(line.startswith("Shell command") for line in told), "of which some hold whole recipes"
    assert any(line.startswith("error: data.puzzles: ") for line in told[-20:])
    folder = (workflow.folder / RAW).parent
    assert (folder / "rejects.raw").read_bytes() == lines(QUESTIONS)
    assert len(list(jsonl.read(folder / "rejects.jsonl"))) == len(QUESTIONS)
    assert not (folder / "train.jsonl").exists()


def without_extras(root: Path, folder: Path) -> dict[str, str]:
    """The environment of processes to which what the extra `train` installs is not there."""
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    names = [re.split(r"[~=>]", name)[0] for name in wanted]
    assert "torch" in names
    (folder / "light").mkdir()
    (folder / "light/sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({names}))\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "light"), str(folder / "src")])}


def call(environment: dict[str, str], folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_login_node_plans_and_makes_records_tokens_and_rows(workflow: Workflow, root: Path) -> None:
    """A small tokenizer and few records."""
    environment = without_extras(root, workflow.folder)
    with pytest.raises(AssertionError, match="torch halted"):
        call(environment, workflow.folder, "-c", "import torch")
    workflow.edit("config/workflow.yaml", r"records: \d+(.*), shards: 2", r"records: 60\1, shards: 1")
    workflow.edit("config/model/demo.yaml", r"^ +- \{dataset: stdlib.*\n", "")
    workflow.edit("config/model/demo.yaml", r"vocabulary: \d+", "vocabulary: 400")
    call(environment, workflow.folder, "-m", "snakemake", "--cores", "2", PACKED)
    assert read_json(workflow.folder / PACKED)["rows"] > 0
