"""The whole graph for real, two processes a stage, at a size of minutes; killed in stage 2 and started again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from longspec.atomic_files import sha256_file
from tests.workflow.conftest import Workflow, copy_to

pytestmark = pytest.mark.slow
RESULTS = "results/demo/sinkpi-slicing"
SMALL = {
    "config/model/demo.yaml": [(r"hidden: \d+", "hidden: 32"), (r"layers: \d+", "layers: 2"), (r", steps: \d+", ", steps: 12")],
    "config/run_stage/demo_base.yaml": [(r"steps: \d+", "steps: 12"), (r"save_every: \d+", "save_every: 4")],
    "config/run_stage/demo_long.yaml": [(r"steps: \d+", "steps: 24"), (r"save_every: \d+", "save_every: 4")],
    "config/run_stage/demo_longcot.yaml": [(r"steps: \d+", "steps: 6")],
    "config/workflow.yaml": [
        (r"prompts: \d+", "prompts: 6"),
        (r"new_tokens: \d+", "new_tokens: 8"),
        (r"records: \d+", "records: 300"),
    ],
}
OPTIONS = ["--cores", "2", "--set-resources", "train:ranks=2"]


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Workflow:
    """The demo with small numbers."""
    copy = copy_to(tmp_path_factory.mktemp("demo"), root)
    for name, changes in SMALL.items():
        for pattern, new in changes:
            copy.edit(name, pattern, new)
    return copy


def said(workflow: Workflow) -> Path:
    """All that the last start has printed."""
    return workflow.folder.parent / "said.txt"


def start(workflow: Workflow, goal: str = "final_draft") -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(workflow.folder / "src")}
    command = [sys.executable, "-m", "snakemake", goal, *OPTIONS]
    with said(workflow).open("w") as output:
        return subprocess.Popen(command, cwd=workflow.folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def build(workflow: Workflow, goal: str = "final_draft") -> str:
    code, text = start(workflow, goal).wait(900), said(workflow).read_text()
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


def weights(workflow: Workflow) -> str:
    return sha256_file(workflow.folder / RESULTS / "final_draft/model.safetensors")


@pytest.fixture(scope="module")
def killed_and_finished(workflow: Workflow) -> Workflow:
    """SIGKILL to every process of stage 2 between two checkpoints, then the same command again."""
    process = start(workflow)
    metrics = workflow.folder / RESULTS / "long/checkpoints/metrics.jsonl"
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
    assert not (workflow.folder / RESULTS / "long/checkpoint.json").exists()
    text = build(workflow)
    assert f"rule train:\n    input: {RESULTS}/base" not in text, "stage 1 must not be trained again"
    log = (workflow.folder / "logs/train/demo/sinkpi-slicing/long.log").read_text()
    assert re.search(r"starting at step (8|12)\b", log), "a save may happen between the look at the metrics and the kill"
    return workflow


def test_final_draft_holds_what_a_user_needs(killed_and_finished: Workflow) -> None:
    folder = killed_and_finished.folder / RESULTS / "final_draft"
    names = {path.name for path in folder.iterdir()}
    assert {"draft_model_weights.pth", "model.safetensors", "config.json", "training_config.yaml", "provenance.json"} < names
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("def main(): pass")) == "def main(): pass"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert [provenance["stages"][stage]["world_size"] for stage in ("base", "long", "longcot")] == [2, 2, 2]
    assert [provenance["stages"][stage]["zero_stage"] for stage in ("base", "long", "longcot")] == [1, 3, 3]


def test_the_report_is_one_file_with_the_measured_numbers(killed_and_finished: Workflow) -> None:
    page = (killed_and_finished.folder / "results/demo/report.html").read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    numbers = json.loads((killed_and_finished.folder / "results/demo/report.json").read_text())
    lines = [
        json.loads(line)
        for line in (killed_and_finished.folder / RESULTS / "evaluation/longcot.jsonl").read_text().splitlines()
    ]
    measured = sum(line["new_tokens"] for line in lines) / sum(line["rounds"] for line in lines)
    assert numbers["overall"]["sinkpi-slicing"]["longcot"]["mean"] == pytest.approx(measured)
    assert numbers["lossless"]["sinkpi-slicing"]["unexplained"] == 0
    assert f"{measured:.2f}" in page


def test_nothing_is_left_to_do_and_snakemakes_own_report_works(killed_and_finished: Workflow) -> None:
    assert "Nothing to be done" in build(killed_and_finished)
    killed_and_finished.output("final_draft", "--report", "snakemake-report.html")
    assert "report.html" in (killed_and_finished.folder / "snakemake-report.html").read_text()


def test_undisturbed_stages_give_the_same_bytes(killed_and_finished: Workflow) -> None:
    disturbed = weights(killed_and_finished)
    # The final draft too: Snakemake does not miss what lies between files that are up to date.
    for stage in ("long", "longcot", "final_draft"):
        subprocess.run(["rm", "-r", stage], cwd=killed_and_finished.folder / RESULTS, check=True)
    build(killed_and_finished, f"{RESULTS}/final_draft/provenance.json")
    log = (killed_and_finished.folder / "logs/train/demo/sinkpi-slicing/long.log").read_text()
    assert "starting at step 0" in log
    assert weights(killed_and_finished) == disturbed
