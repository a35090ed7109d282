"""A login node's installation, `pip install -e .`: it plans, and it prepares data."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from longspec.atomic_files import read_json
from tests.workflow.planning import Workflow

pytestmark = pytest.mark.slow
PACKED = "data/packed/demo/puzzles-longcot-2048-split/manifest.json"


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


def test_it_plans_and_makes_records_tokens_and_rows(workflow: Workflow, root: Path) -> None:
    """A small tokenizer and few records."""
    environment = without_extras(root, workflow.folder)
    with pytest.raises(AssertionError, match="torch halted"):
        call(environment, workflow.folder, "-c", "import torch")
    workflow.edit("config/workflow.yaml", r"records: \d+(.*), shards: 2", r"records: 60\1, shards: 1")
    workflow.edit("config/model/demo.yaml", r"^ +- \{dataset: stdlib.*\n", "")
    workflow.edit("config/model/demo.yaml", r"vocabulary: \d+", "vocabulary: 400")
    call(environment, workflow.folder, "-m", "snakemake", "--cores", "2", PACKED)
    assert read_json(workflow.folder / PACKED)["rows"] > 0
