"""The whole graph for real, two processes a stage, at a size of minutes; killed in stage 2 and started again."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.workflow.conftest import Workflow, copy_to
from tests.workflow.running import SMALL_TARGET, build, kill_in, resumed_at, shrink, weights

# What it tells of the whole graph is told by test_made_up_method.py too, of killed stages by tests/slurm and test_job.py.
pytestmark = [pytest.mark.slow, pytest.mark.long]
RESULTS, LOG = "results/demo/sinkpi-slicing", "logs/train/demo/sinkpi-slicing/long.log"
SMALL = {
    "config/run/demo.yaml:base": [(r"steps: \d+", "steps: 12"), (r"save_every: \d+", "save_every: 4")],
    "config/run/demo.yaml:long": [(r"steps: \d+", "steps: 24"), (r"save_every: \d+", "save_every: 4")],
    "config/run/demo.yaml:longcot": [(r"steps: \d+", "steps: 6")],
}


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Workflow:
    """The demo with small numbers."""
    copy = copy_to(tmp_path_factory.mktemp("demo"), root)
    shrink(copy, SMALL_TARGET | SMALL)
    return copy


@pytest.fixture(scope="module")
def killed_and_finished(workflow: Workflow) -> Workflow:
    """SIGKILL to every process of stage 2 between two checkpoints, then the same command again."""
    kill_in(workflow, f"{RESULTS}/long")
    text = build(workflow)
    assert f"rule train:\n    input: {RESULTS}/base" not in text, "stage 1 must not be trained again"
    assert resumed_at(workflow, LOG) in (8, 12), "a save may happen between the look at the metrics and the kill"
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
    # Of six records of each task one would be set apart, which are too few to choose by: all are told.
    assert "fewer than 8 records" in numbers["final"]["sinkpi-slicing"]["why"]
    measured = sum(line["new_tokens"] for line in lines) / sum(line["rounds"] for line in lines)
    assert numbers["overall"]["sinkpi-slicing"]["longcot"]["mean"] == pytest.approx(measured)
    assert numbers["lossless"]["sinkpi-slicing"]["unexplained"] == 0
    assert f"{measured:.2f}" in page


def test_nothing_is_left_to_do_and_snakemakes_own_report_works(killed_and_finished: Workflow) -> None:
    assert "Nothing to be done" in build(killed_and_finished)
    killed_and_finished.output("final_draft", "--report", "snakemake-report.html")
    assert "report.html" in (killed_and_finished.folder / "snakemake-report.html").read_text()


def test_undisturbed_stages_give_the_same_bytes(killed_and_finished: Workflow) -> None:
    final_draft = killed_and_finished.folder / RESULTS / "final_draft"
    disturbed = weights(final_draft)
    # The final draft too: Snakemake does not miss what lies between files that are up to date.
    for stage in ("long", "longcot", "final_draft"):
        subprocess.run(["rm", "-r", stage], cwd=killed_and_finished.folder / RESULTS, check=True)
    build(killed_and_finished, f"{RESULTS}/final_draft/provenance.json")
    assert resumed_at(killed_and_finished, LOG) == 0
    assert weights(final_draft) == disturbed
