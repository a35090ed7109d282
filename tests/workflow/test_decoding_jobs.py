"""What the jobs that decode ask for, by a plan: the longest prompt counts, and only what is still to be made is judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec.workflow.answers import AnswersPlan
from longspec.workflow.bench import bench_of
from longspec.workflow.jobs.decoding_jobs import DecodingJobs
from longspec.workflow.jobs.decoding_ranks import Decoding, Machine, rank_bytes, target_of
from longspec.workflow.plan import Plan
from tests.workflow.planning import FILE, Settings

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 2048,
    "dtype": "bfloat16",
}
WEIGHTS = 8_000_000_000
TARGET = target_of(CONFIG, WEIGHTS)
EVALUATION: dict[str, Any] = {
    "prompts": 1,
    "repeats": 1,
    "seed": 0,
    "new_tokens": 24,
    "temperatures": [0],
    "shapes": [4, [2, 6, 6]],
    "tasks": {
        "short": {"data": "stdlib", "context": [64, 100], "new_tokens": 500},
        "long": {"data": "stdlib", "context": [64, 4000]},
        "file": {"source": "prompts.jsonl", "longest": 3000, "new_tokens": 1200},
    },
}
# A GLIDE layer: own and cross attention (queries and output of both, keys and values of one) and a feed-forward part.
LAYER = 4 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 8192
RUN = ("demo", "sinkpi-slicing", "lookup")
OWN = ("answer", "", "demo", "own")


@pytest.fixture
def plan(settings: Settings) -> Plan:
    """The demo with these tasks, its target being that of CONFIG."""
    folder = Path("models/demo/target")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("w") as weights:
        weights.truncate(2 * WEIGHTS)
    Path("models/demo/target_manifest.json").touch()
    Path("prompts.jsonl").write_text('{"prompt": "x", "reference": "y"}\n')
    regenerate = "own: {source: puzzles, records: 400, seed: 0, shards: 2, regenerate: {new_tokens: 256, longest_prompt: 3000}}"
    settings.edit(str(FILE), r"^data:\n", f"data:\n  {regenerate}\n")
    settings.edit("config/run/demo.yaml:longcot", "name: puzzles", "name: own")
    settings.edit("config/run/demo.yaml", r"^evaluation:\n(  .*\n)+", "")
    return settings.plan(evaluation=EVALUATION)


def jobs_of(plan: Plan, warn: Any = pytest.fail, **given: Any) -> DecodingJobs:
    """These jobs, on machines of eight GPUs."""
    rules = ("evaluate", "evaluate_bench", "answer")
    machines = {rule: Machine(rule, 8, node_gres="gpu:h100:8", **given) for rule in rules}
    return DecodingJobs(plan, bench_of(plan), AnswersPlan(plan), machines, warn)


def megabytes(decoding: Decoding) -> int:
    return -(-rank_bytes(TARGET, decoding, 1) // 10**6)


def test_the_longest_prompt_and_text_of_all_tasks_count(plan: Plan) -> None:
    """4,200 tokens of the file's prompts with their answers; 4,000 of the other task's prompts in one forward."""
    nodes = 15
    decoding = Decoding(
        tokens=4200 + 64 + nodes, forward=4000, logits=1200, nodes=nodes, draft=LAYER + 3 * 4096 * 4096, element=2
    )
    needed = megabytes(decoding)
    assert 18_000 < needed < 22_000
    assert jobs_of(plan, gpu_mem=needed).ranks("evaluate", "demo") == 1
    jobs = jobs_of(plan, gpu_mem=needed - 1)
    assert (jobs.ranks("evaluate", "demo"), jobs.gpus("evaluate", "demo")) == (2, "gpu:h100:2")


def test_the_largest_batch_of_answers_counts(plan: Plan) -> None:
    """Sixteen rows of 3,256 tokens."""
    rows = 16
    decoding = Decoding(tokens=rows * 3256, forward=rows * 3000, masked=rows * 3000**2, nodes=rows, element=2)
    needed = megabytes(decoding)
    assert jobs_of(plan, gpu_mem=needed).ranks(*OWN) == 1
    jobs = jobs_of(plan, gpu_mem=needed - 1)
    assert (jobs.ranks(*OWN), jobs.gpus(*OWN)) == (2, "gpu:h100:2")


def test_what_is_still_to_be_made_is_judged(plan: Plan) -> None:
    jobs = jobs_of(plan, gpu_mem=1000)
    with pytest.raises(ValueError, match=r"^run 'demo': evaluate: needs .* on each of 8 GPUs, by an estimate"):
        jobs.judge("evaluate", *RUN)
    with pytest.raises(ValueError, match=r"^answers by demo to own: needs .* set-resources: answer: gpu_mem has 1\.0 GB"):
        jobs.judge("answer", model="demo", dataset="own")
    made = [Path(plan.evaluated.format(run="demo", variant="sinkpi-slicing", drafter="lookup"))]
    made.append(Path(AnswersPlan(plan).records("demo", "own")))
    for path in made:
        path.parent.mkdir(parents=True)
        path.touch()
    jobs.judge("evaluate", *RUN)
    jobs.judge("answer", model="demo", dataset="own")


def test_a_target_that_comes_too_large_while_jobs_run_is_told_of_once(plan: Plan) -> None:
    """The jobs of the others go on."""
    told: list[str] = []
    jobs = jobs_of(plan, told.append, gpu_mem=1000)
    assert [jobs.ranks("evaluate", "demo"), jobs.ranks("evaluate", "demo")] == [8, 8]
    assert len(told) == 1


def test_vllm_and_servers_are_one_process(plan: Plan, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspec.workflow.checks._check_engines", lambda _: None)
    served = 'regenerate: {new_tokens: 256, engine: endpoint, server: "serve {model} {port}"}}'
    settings.edit(str(FILE), r"regenerate: \{.*$", served)
    shapes = {"shapes": [4], "engine": "vllm"}
    planned = settings.plan(evaluation=EVALUATION | shapes)
    jobs = jobs_of(planned, gpu_mem=1000)
    assert (jobs.ranks("evaluate", "demo"), jobs.ranks(*OWN), jobs.gpus(*OWN)) == (
        1,
        1,
        "gpu:h100:1",
    )
    with pytest.raises(ValueError, match=r"^set-resources: evaluate: ranks: 2: .* evaluation\.engine: vllm is one process"):
        jobs_of(planned, ranks=2).judge("evaluate", *RUN)
    asked = 'regenerate: {new_tokens: 256, engine: endpoint, endpoint: "http://host:8000/v1"}}'
    settings.edit(str(FILE), r"regenerate: \{.*$", asked)
    jobs = jobs_of(settings.plan(evaluation=EVALUATION), gpu_mem=1000)
    assert (jobs.ranks(*OWN), jobs.gpus(*OWN)) == (1, "")
