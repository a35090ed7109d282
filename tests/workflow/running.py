"""A copy of the workflow that is run for real, two processes a stage, at a size of minutes."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from longspec.atomic_files import sha256_file
from tests.workflow.planning import Workflow

SMALL_TARGET = {
    "config/model/demo.yaml": [(r"hidden: \d+", "hidden: 32"), (r"layers: \d+", "layers: 2"), (r", steps: \d+", ", steps: 12")],
    "config/workflow.yaml": [
        (r"prompts: \d+", "prompts: 6"),
        (r"new_tokens: \d+", "new_tokens: 8"),
        (r"records: \d+", "records: 300"),
    ],
    **{f"config/run/{run}.yaml": [(r"new_tokens: \d+", "new_tokens: 8")] for run in ("demo", "demo-eagle3")},
}
OPTIONS = ["--cores", "2", "--set-resources", "train:ranks=2"]


def shrink(workflow: Workflow, changes: dict[str, list[tuple[str, str]]]) -> None:
    """Put small numbers in the copy's files."""
    for name, edits in changes.items():
        for pattern, new in edits:
            workflow.edit(name, pattern, new)


def said(workflow: Workflow) -> Path:
    """All that the last start has printed."""
    return workflow.folder.parent / "said.txt"


def start(workflow: Workflow, *goals: str) -> subprocess.Popen[bytes]:
    """Snakemake as a user starts it."""
    environment = os.environ | {"PYTHONPATH": str(workflow.folder / "src")}
    command = [sys.executable, "-m", "snakemake", *(goals or ("final_draft",)), *OPTIONS]
    with said(workflow).open("w") as output:
        return subprocess.Popen(command, cwd=workflow.folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def build(workflow: Workflow, *goals: str) -> str:
    """All that it prints; it must succeed."""
    code, text = start(workflow, *goals).wait(900), said(workflow).read_text()
    assert code == 0, text
    return text


def training_processes(workflow: Workflow) -> list[int]:
    """Launcher and ranks of the copy's train job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command, folder = (entry / "cmdline").read_text(), (entry / "cwd").readlink()
            except OSError:  # ended meanwhile
                continue
            if "longspec.train" in command and "\0--recipe" in command and folder == workflow.folder:
                found.append(int(entry.name))
    return found


def kill_in(workflow: Workflow, stage: str, *goals: str) -> None:
    """Run until the stage of this folder has done ten steps, then SIGKILL every process that trains it."""
    process = start(workflow, *goals)
    metrics = workflow.folder / stage / "checkpoints/metrics.jsonl"
    deadline = time.monotonic() + 900
    while not metrics.exists() or metrics.read_text().count("\n") < 10:
        assert process.poll() is None, said(workflow).read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes = training_processes(workflow)
    assert len(processes) >= 3
    for pid in processes:
        with suppress(ProcessLookupError):  # they end with their parents
            os.kill(pid, signal.SIGKILL)
    assert process.wait(300) != 0
    assert "Error in rule train" in said(workflow).read_text()
    assert not (workflow.folder / stage / "checkpoint.json").exists()


def resumed_at(workflow: Workflow, log: str) -> int:
    """The step at which a stage's last job began, by its log."""
    found = re.search(r"starting at step (\d+)\b", (workflow.folder / log).read_text())
    assert found is not None
    return int(found[1])


def weights(folder: Path) -> str:
    """The hash of a draft folder's weights."""
    return sha256_file(folder / "model.safetensors")
