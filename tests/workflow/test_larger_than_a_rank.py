"""A target that one rank cannot hold goes through all of `final_draft` on two, under a limit that the system enforces."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.workflow.jobs.decoding_ranks import OVERHEAD
from tests.corpus import Corpus
from tests.workflow.planning import Workflow, copy_to
from tests.workflow.test_split_target import MODEL, make_target, measured

pytestmark = [pytest.mark.slow, pytest.mark.long]

DEEP = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "initializer_range": 0.05}
IN_FILE = {"dtype": "bfloat16"}  # as large targets come; the run's float32 is made of it rank by rank
WHOLE = 400 * 10**6  # bytes of its weights in float32, at least
RANK = 380 * 10**6  # bytes that a rank may have beside the program itself
RUN = """\
target: tiny
stages: [base]
recipe:
  data: {name: asked, sequence_length: 64}
  precision: fp32
  global_batch: 2
  steps: 4
runtime: {target: tensor_parallel, micro_batch: 1, save_every: 2, held_out_every: 2, held_out_rows: 2}
evaluation:
  prompts: 2
  repeats: 1
  temperatures: [0, 0.8]
  shapes: [3, [2, 3]]
  tasks:
    asked: {data: asked, context: [8, 400], new_tokens: 8, whole_questions: true}
"""
ASKED = (
    "  asked: {source: puzzles, records: 30, seed: 0, shards: 1, held_out: 0.3,"
    " regenerate: {new_tokens: 4, cut: keep, precision: fp32, batch: 4, longest_prompt: 200}}\n"
)
# Where a target is about to be loaded, so that what the program itself takes does not count. Nor does the file of weights,
# which is mapped: the system counts that too, though it takes no memory.
LIMITED = """\
    if "RANK_MEMORY" in os.environ:
        used = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        used += int(re.search(r"VmData:\\\\s*(\\\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(os.environ["RANK_MEMORY"]),) * 2)
"""
P = "results/tiny/sinkpi-slicing"
DRAFTERS = ("untrained", "lookup", "base")
GPU = (OVERHEAD + RANK) // 10**6  # MB: the estimate's share for what a GPU's program takes, and what a rank may have here
TWO_GPUS = ("train:ranks=2", "train:gres='gpu:2'", f"evaluate:gpu_mem={GPU}", f"answer:gpu_mem={GPU}")


@pytest.fixture
def workflow(tmp_path: Path, root: Path, corpus: Corpus) -> Workflow:
    """A copy whose run trains with such a target and answers by it, and whose ranks can be limited."""
    (tmp_path / "copy").mkdir()
    copy = copy_to(tmp_path / "copy", root)
    make_target(tmp_path / "target", corpus, **DEEP, **IN_FILE)
    assert (tmp_path / "target/model.safetensors").stat().st_size > WHOLE / 2
    (copy.folder / "config/model/tiny.yaml").write_text(MODEL.format(folder=tmp_path / "target"))
    (copy.folder / "config/run/tiny.yaml").write_text(RUN)
    copy.edit("config/workflow.yaml", r"^data:\n", f"data:\n{ASKED}")
    copy.edit("config/workflow.yaml", r"^runs: \[.*?\]", "runs: [tiny]")
    loading = "src/longspec/models/target.py"
    copy.edit(loading, r"^from copy import", "import os\nimport re\nimport resource\nfrom copy import")
    copy.edit(loading, r"^    check_target\(config, .*\n", rf"\g<0>{LIMITED}")
    return copy


def call(workflow: Workflow, *arguments: str, limited: bool = True) -> tuple[int, str]:
    """Snakemake's exit status, and what it printed, the logs of failed jobs in it."""
    command = [sys.executable, "-m", "snakemake", "--printshellcmds", "--cores", "2", *arguments]
    # The system counts the stacks of gloo's threads as well, 8 MB each, and a thread that gets none waits for ever.
    stack = (2**20, resource.getrlimit(resource.RLIMIT_STACK)[1])
    environment = os.environ | {"PYTHONPATH": str(workflow.folder / "src")}
    environment |= {"RANK_MEMORY": str(RANK)} if limited else {}
    done = subprocess.run(
        command,
        cwd=workflow.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, stack),
    )
    return done.returncode, done.stdout + done.stderr


def evaluated(workflow: Workflow) -> list[list[dict[str, Any]]]:
    """The lines of each drafter's evaluation."""
    return [measured(workflow.folder / f"{P}/evaluation/{drafter}.jsonl") for drafter in DRAFTERS]


def test_two_ranks_do_what_one_has_no_memory_for(workflow: Workflow) -> None:
    pytest.importorskip("accelerate")
    # One rank: its answers die of the limit; and with answers made, so do training and evaluation.
    refused = r"(can't allocate memory|Cannot allocate memory|MemoryError)"
    code, text = call(workflow, f"{P}/base/checkpoint.json")
    assert code == 1
    assert "Error in rule answer:" in text
    assert re.search(refused, text)
    goals = (f"{P}/base/checkpoint.json", f"{P}/evaluation/lookup.jsonl")
    code, text = call(workflow, *goals, "--keep-going", "--set-resources", "answer:ranks=2")
    assert code == 1
    assert {"train", "evaluate"} == set(re.findall(r"Error in rule (\w+):", text))
    assert len(re.findall(refused, text)) >= 2

    code, text = call(workflow, "final_draft", "--set-resources", *TWO_GPUS)
    assert code == 0, text
    logs = [workflow.folder / f"logs/evaluate/tiny/sinkpi-slicing/{drafter}.log" for drafter in DRAFTERS]
    logs += [workflow.folder / "logs/train/tiny/sinkpi-slicing/base.log"]
    logs += workflow.folder.glob("logs/answer/tiny/asked/*/0-of-1.log")
    assert len(logs) == 5
    for log in logs:
        assert "--nproc-per-node=2" in log.read_text()
    assert any("held_out" in row for row in jsonl.read(workflow.folder / f"{P}/base/metrics.jsonl"))
    assert (workflow.folder / f"{P}/final_draft/model.safetensors").is_file()

    split = evaluated(workflow)
    for drafter in DRAFTERS:
        (workflow.folder / f"{P}/evaluation/{drafter}.jsonl").unlink()
    code, text = call(workflow, *(f"{P}/evaluation/{drafter}.jsonl" for drafter in DRAFTERS), limited=False)
    assert code == 0, text
    assert "launch --plain --ranks 1 " in text
    assert evaluated(workflow) == split, "tokens and what was accepted, of chains and trees, greedy and drawn"
    assert all(line["tokens"] for lines in split for line in lines)
