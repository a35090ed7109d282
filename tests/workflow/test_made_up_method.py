"""A draft method that the house does not know goes through the whole graph, with no change elsewhere, and also disturbed.

tests/workflow/made_up holds it: a folder of src/longspec/methods, and configuration files. Its second stage is offline.
"""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspec.atomic_files import sha256_file
from tests.workflow.calls import Place
from tests.workflow.chaos import Round, undisturbed
from tests.workflow.same_files import FOLDERS
from tests.workflow.small_run import small_run

pytestmark = pytest.mark.slow
MADE_UP = Path(__file__).parent / "made_up"
RUN = "made-up"
RESULTS = f"results/{RUN}/made-up"
MOMENTS = 3
# Greedy text of the target by itself and with its draft, and the card that push would upload.
USE = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from longspec.decode.generate import generate
from longspec.draft.hub_upload import model_card
from longspec.draft.hub_upload import files_to_push

folder, target_path, report = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
target = AutoModelForCausalLM.from_pretrained(target_path).double().eval()
ids = AutoTokenizer.from_pretrained(folder)("def main(", return_tensors="pt").input_ids
options = {"max_new_tokens": 30, "do_sample": False, "attention_mask": torch.ones_like(ids)}
print(json.dumps([
    target.generate(ids, **options).tolist(),
    [generate(target, ids, draft=folder, shape=shape, **options).tolist() for shape in (1, 4, (3, 5))],
    files_to_push(folder),
    model_card(folder, "owner/name", "main", report, None),
]))
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[tuple[Place, dict[str, str], dict[str, float]]]:
    """The whole graph of the small run with the method in its place, on two ranks a stage; nothing else is touched."""
    workflow = small_run(tmp_path_factory.mktemp("made-up"), root)
    method = workflow.folder / "src/longspec/methods/made_up"
    shutil.copytree(MADE_UP, method, ignore=shutil.ignore_patterns("config", "__pycache__"))
    for file in (MADE_UP / "config").rglob("*.yaml"):
        place = workflow.folder / "config" / file.relative_to(MADE_UP / "config")
        assert not place.exists()
        shutil.copy(file, place)
    for pattern, new in ((r"\bprompts: \d+", "prompts: 32"), (r"held_out: 0\.1", "held_out: 0.15")):  # eight choose the stage
        workflow.edit("config/workflow.yaml", pattern, new)
    place = Place(workflow.folder.resolve(), RUN)
    with place.warmed(root):
        yield place, *undisturbed(place)


@pytest.fixture
def finished(graph: tuple[Place, dict[str, str], dict[str, float]]) -> Place:
    """The folder in which the graph has ended."""
    return graph[0]


def test_nothing_is_left_to_do(finished: Place) -> None:
    assert "Nothing to be done" in finished.output("-n")


def test_stages_follow_each_other_and_the_chosen_one_is_published(finished: Place) -> None:
    first, second = (load_file(finished.folder / RESULTS / stage / "draft/model.safetensors") for stage in ("base", "longcot"))
    assert first.keys() == second.keys() == {"ahead.weight"}
    moved = [float((state["ahead.weight"] - torch.eye(32)).norm()) for state in (first, second)]
    assert moved[0] > 0.01, "trained away from the identity"
    between = float((first["ahead.weight"] - second["ahead.weight"]).norm())
    assert 0 < between < moved[1], "the second stage began with the first one's draft"
    choice = json.loads((finished.folder / RESULTS / "final_stage.json").read_text())
    files = (finished.folder / RESULTS / folder / "model.safetensors" for folder in ("final_draft", f"{choice['stage']}/draft"))
    assert len({sha256_file(path) for path in files}) == 1
    assert json.loads((finished.folder / RESULTS / "final_draft/provenance.json").read_text())["final"] == choice


def test_estimates_report_and_gates(finished: Place) -> None:
    rows = [json.loads(line) for line in (finished.folder / RESULTS / "base/metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["labels_two_ahead"] < row["labels"] for row in rows), "what the method counts is in the metrics"
    held_out = [row["held_out"] for row in rows if "held_out" in row]
    assert [row["step"] for row in rows if "held_out" in row] == [6, 12]
    assert all(found["expected_tokens"] == pytest.approx(1 + found["acceptance_1"]) for found in held_out)
    results = finished.folder / f"results/{RUN}"
    numbers = json.loads((results / "report.json").read_text())
    lines = [json.loads(line) for line in (finished.folder / RESULTS / "evaluation/longcot.jsonl").read_text().splitlines()]
    records = numbers["final"]["made-up"]["records"]
    told = [line for line in lines if line["record"] not in records["sums"]]
    measured = sum(line["new_tokens"] for line in told) / sum(line["rounds"] for line in told)
    assert numbers["overall"]["made-up"]["longcot"]["mean"] == pytest.approx(measured)
    assert 1 <= measured <= 2, "a round brings one drafted token at most"
    assert numbers["lossless"]["made-up"]["unexplained"] == 0
    assert "Soft labels" in (results / "report.html").read_text()
    assert (results / "gates.json").is_file()


def test_the_final_draft_decodes_losslessly_and_has_a_card(finished: Place) -> None:
    folder = f"{RESULTS}/final_draft"
    target = json.loads((finished.folder / "models/demo/target_manifest.json").read_text())["path"]
    command = [finished.warm / "bin/python", "-c", USE, folder, target, f"results/{RUN}/report.json"]
    done = subprocess.run(command, cwd=finished.folder, env=finished.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain, drafted, files, card = json.loads(done.stdout.splitlines()[-1])
    assert drafted == [plain, plain, plain]
    assert {"model.safetensors", "config.json", "custom_generate/generate.py", "provenance.json"} < set(files)
    config = json.loads((finished.folder / folder / "config.json").read_text())
    assert (config["draft"], config["architectures"], config["hidden_size"]) == ("made_up", ["MadeUpForCausalLM"], 32)
    assert "- made_up\n" in card
    assert "one linear layer that says the token after the next one, trained on soft labels" in card
    assert "GLIDE" not in card
    assert "| this draft |" in card


def test_a_disturbed_run_ends_in_the_same_files(graph: tuple[Place, dict[str, str], dict[str, float]]) -> None:
    """From nothing, through three moments: the short version of `make chaos`."""
    place, expected, times = graph
    for name in (*FOLDERS, "logs", ".snakemake"):
        shutil.rmtree(place.folder / name)
    disturbed = Round(place, random.Random(0), times, 0)
    disturbed.run(MOMENTS)
    disturbed.check(expected)
    assert len(disturbed.moments) == MOMENTS
    assert all(moment.victim for moment in disturbed.moments)
