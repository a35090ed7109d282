"""Memory and minutes of a stage's Slurm job: estimated once there is something to estimate from, within its limits."""

import json
import shutil
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from transformers import LlamaConfig

from longspec.atomic_files import write_json
from longspec.config import compose_stage, to_yaml
from tests.corpus import LENGTH, Corpus
from tests.warm_jobs import popen
from tests.workflow.planning import Workflow, copy_to

STAGE = "results/demo/sinkpi-slicing/base/checkpoint.json"
ROWS = f"data/packed/demo/stdlib-base-{LENGTH}-split/manifest.json"


@pytest.fixture
def workflow(tmp_path: Path, root: Path) -> Workflow:
    """A copy whose stage has short rows, in a batch for eight processes."""
    (tmp_path / "workflow").mkdir()
    workflow = copy_to(tmp_path / "workflow", root)
    workflow.edit("config/run/demo.yaml:base", "sequence_length: 128", f"sequence_length: {LENGTH}")
    workflow.edit("config/run/demo.yaml:base", "global_batch: 16", "global_batch: 8")
    return workflow


@pytest.fixture
def estimable(workflow: Workflow, corpus: Corpus) -> Workflow:
    """The same with a target and rows; what lies before them in the graph is not there."""
    folder = workflow.folder / "models/demo"
    LlamaConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=8).save_pretrained(folder / "target")
    write_json(folder / "target_manifest.json", {"path": "models/demo/target", "files": {}})
    shutil.copytree(corpus.packed.parent, (workflow.folder / ROWS).parent)
    return workflow


def stage_job(workflow: Workflow) -> dict[str, str]:
    """The resources of the stage's job."""
    text = workflow.plan("--profile", "slurm")[STAGE]["resources"]
    return dict(part.split("=", 1) for part in text.split(", "))


def test_the_estimate_is_what_plan_tells_unless_the_profile_asks_by_itself(estimable: Workflow) -> None:
    config = compose_stage("demo", "sinkpi-slicing", "base", estimable.folder / "config")
    command = [sys.executable, "-m", "longspec.train", "plan", "--json", "--ranks", "8", "--flops", "4e14", "--data", ROWS]
    for section in ("recipe", "runtime"):
        (estimable.folder / section).write_text(to_yaml(config[section]))
        command += [f"--{section}", section]
    command += ["--target", "models/demo/target_manifest.json"]
    process = popen(command, cwd=estimable.folder, stdout=PIPE, text=True)
    told, _ = process.communicate()
    assert process.returncode == 0
    job = stage_job(estimable)
    assert json.loads(told) == [{"memory_mb": int(job["mem_mb"]), "minutes": int(job["runtime"])}]
    assert int(job["mem_mb"]) > 8 * 6 * 1024
    assert job["runtime"] == "11"
    estimable.edit("profiles/slurm/profile.yaml", "^    node_mem: 900000 .*$", "    mem_mb: 123456\n    runtime: 77")
    job = stage_job(estimable)
    assert (job["mem_mb"], job["runtime"]) == ("123456", "77")
